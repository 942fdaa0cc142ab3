"""Doctor, report and ledger: read run folders and training logs."""

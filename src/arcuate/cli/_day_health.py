"""What is plainly wrong with a new day's recording, told before anything is read or learned from it."""

from arcuate.adaptation.drift import SAME_MAPPING, DayNumbers, fingerprint_likeness, measure_day, spread
from arcuate.cli.console import counted, say
from arcuate.data.store import Store

N_TRIALS = 20


def tell_health(store: Store, session: str, like: str) -> None:
    """Flat channels, and channels in another order than on the day it is compared with (where that is here)."""
    day = look(store, session)
    n_flat = int(day.flat.sum())
    if n_flat == len(day.flat):
        say(
            f"warning: every channel of {session} is flat; nothing can be learned from it, check the recording"
        )
        return
    if n_flat:
        say(f"note: {counted(n_flat, 'channel')} of {len(day.flat)} flat on {session}")
    if like not in store.sessions:
        return
    same = fingerprint_likeness(look(store, like), day)
    if same is not None and same < SAME_MAPPING:
        say(
            f"warning: the channels of {session} look re-ordered against {like} (likeness {same:.2f}); put them in the"
            " old order and prepare the day again, for neither a layer of another day nor adaptation can undo that"
        )


def look(store: Store, session: str) -> DayNumbers:
    trials = [t for t in store.trials if t.session == session and t.n_bins > 1]
    return measure_day(store, session, spread(trials, N_TRIALS))

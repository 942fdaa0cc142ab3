// Draws the charts of a page when they come into view, and links them: hidden series, highlighted session or phoneme.
"use strict";
(() => {
  const views = [];
  const linked = ["session", "phoneme"];
  const now = {};

  const draw = async (node) => {
    const id = node.dataset.chart;
    const spec = JSON.parse(document.getElementById(id).textContent);
    try {
      const options = { actions: false, renderer: "svg", ast: true, tooltip: { theme: "custom" } };
      const { view } = await vegaEmbed(node, spec, options);
      const names = (spec.params || []).map((param) => param.name);
      views.push({ view, names });
      node.style.minHeight = "";
      view.addEventListener("pointerover", (event, item) => {
        for (const key of linked) if (item && item.datum && typeof item.datum[key] === "string") highlight(key, item.datum[key]);
      });
      view.addEventListener("pointerout", () => linked.forEach((key) => highlight(key, "")));
      const figure = node.closest("figure");
      for (const button of figure ? figure.querySelectorAll("button[data-series]") : []) {
        button.addEventListener("click", () => {
          button.classList.toggle("off");
          const off = [...figure.querySelectorAll("button.off")].map((b) => b.dataset.series);
          view.signal("hidden", off).runAsync();
        });
      }
      node.dataset.drawn = "yes";
    } catch (error) { // show the static drawing instead
      const fallback = node.parentNode.querySelector("noscript");
      if (fallback) node.innerHTML = fallback.textContent;
      console.error(error);
    }
  };

  const highlight = (key, value) => {
    if ((now[key] || "") === value) return;
    now[key] = value;
    for (const { view, names } of views) if (names.includes(key)) view.signal(key, value).runAsync();
    for (const row of document.querySelectorAll(`[data-${key}]`)) row.classList.toggle("lit", value !== "" && row.dataset[key] === value);
  };

  for (const key of linked) {
    for (const row of document.querySelectorAll(`[data-${key}]`)) {
      row.addEventListener("pointerenter", () => highlight(key, row.dataset[key]));
      row.addEventListener("pointerleave", () => highlight(key, ""));
    }
  }

  for (const button of document.querySelectorAll("button.copy")) {
    button.addEventListener("click", async () => {
      const text = button.parentNode.querySelector("pre").textContent.trim();
      const area = Object.assign(document.createElement("textarea"), { value: text });
      try {
        await navigator.clipboard.writeText(text);
      } catch { // no clipboard on file:// pages of some browsers
        document.body.append(area);
        area.select();
        document.execCommand("copy");
        area.remove();
      }
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  }

  const plots = document.querySelectorAll(".plot[data-chart]");
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      observer.unobserve(entry.target);
      draw(entry.target);
    }
  }, { rootMargin: "600px" });
  plots.forEach((node) => observer.observe(node));
  window.addEventListener("beforeprint", () => plots.forEach((node) => { if (!node.dataset.drawn) { observer.unobserve(node); draw(node); } }));
})();

// Draws the charts of a page and links them: hidden series, highlighted session or phoneme.
// The board calls `setUpPage` for what it adds later.
"use strict";
const setUpPage = (() => {
  let views = [];
  const linked = ["session", "phoneme"];
  const now = {};

  const draw = async (node) => {
    const spec = JSON.parse(document.getElementById(node.dataset.chart).textContent);
    try {
      const options = { actions: false, renderer: "svg", ast: true, tooltip: { theme: "custom" } };
      const { view } = await vegaEmbed(node, spec, options);
      const names = (spec.params || []).map((param) => param.name);
      views.push({ view, names, node });
      node.style.minHeight = "";
      view.addEventListener("pointerover", (event, item) => {
        for (const key of linked) if (item && item.datum && typeof item.datum[key] === "string") highlight(key, item.datum[key]);
      });
      view.addEventListener("pointerout", () => linked.forEach((key) => highlight(key, "")));
      hide(node.closest(".linked, figure"));
      node.dataset.drawn = "yes";
    } catch (error) {
      node.textContent = "This chart cannot be drawn in this browser.";
      console.error(error);
    }
  };

  const hide = (group) => { // the series that are crossed out in the legend of a figure or of a group of figures
    const off = [...group.querySelectorAll("button.off")].map((button) => button.dataset.series);
    for (const { view, names, node } of views) if (group.contains(node) && names.includes("hidden")) view.signal("hidden", off).runAsync();
  };

  const highlight = (key, value) => {
    if ((now[key] || "") === value) return;
    now[key] = value;
    for (const { view, names } of views) if (names.includes(key)) view.signal(key, value).runAsync();
    for (const row of document.querySelectorAll(`[data-${key}]`)) row.classList.toggle("lit", value !== "" && row.dataset[key] === value);
  };

  const setUp = (root) => { // the charts and buttons below an element
    for (const { view, node } of views) if (!node.isConnected) view.finalize();
    views = views.filter(({ node }) => node.isConnected);
    for (const key of linked) {
      for (const row of root.querySelectorAll(`[data-${key}]`)) {
        row.addEventListener("pointerenter", () => highlight(key, row.dataset[key]));
        row.addEventListener("pointerleave", () => highlight(key, ""));
      }
    }
    for (const button of root.querySelectorAll("button.copy")) {
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
    for (const button of root.querySelectorAll("button[data-series]")) {
      button.addEventListener("click", () => {
        button.classList.toggle("off");
        hide(button.closest(".linked, figure"));
      });
    }
    for (const node of root.querySelectorAll(".plot[data-chart]")) draw(node);
  };

  setUp(document);
  return setUp;
})();

// The claims page: a heading sorts its column, a second click turns the order round; two lists show one verdict or one wing.
(() => {
  const heads = (table) => [...table.querySelectorAll("thead th")];
  const named = (table, name) => heads(table).findIndex((head) => head.textContent.trim() === name);
  const table = [...document.querySelectorAll("table")].find((one) => named(one, "wing") >= 0 && named(one, "verdict") >= 0);
  if (!table) return;
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const text = (row, column) => row.cells[column].textContent.trim();
  // verdicts stand in the order of the page's first table, from "holds" on
  const counts = [...document.querySelectorAll("table")].find((one) => named(one, "verdict") === 0);
  const order = counts ? [...counts.tBodies[0].rows].map((row) => text(row, 0)) : [];
  const compare = (a, b) =>
    order.includes(a) && order.includes(b) ? order.indexOf(a) - order.indexOf(b) : a.localeCompare(b);

  const bar = document.createElement("p");
  const shown = document.createElement("output");
  const lists = ["verdict", "wing"].map((name) => {
    const column = named(table, name);
    const values = [...new Set(rows.map((row) => text(row, column)))].sort(compare);
    const list = document.createElement("select");
    list.name = name;
    list.append(new Option(`every ${name}`, ""));
    for (const value of values) {
      list.append(new Option(`${value} (${rows.filter((row) => text(row, column) === value).length})`, value));
    }
    list.addEventListener("change", filter);
    const label = document.createElement("label");
    label.append(`${name} `, list, " ");
    bar.append(label);
    return { list, column };
  });
  bar.append(shown);
  // The theme puts a table into a box that scrolls sideways: the lists stay above it.
  (table.closest(".md-typeset__scrollwrap") ?? table).before(bar);

  function filter() {
    for (const row of rows) {
      row.hidden = lists.some(({ list, column }) => list.value !== "" && text(row, column) !== list.value);
    }
    shown.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} systems`;
  }

  heads(table).forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    button.style.cssText = "all: unset; cursor: pointer";
    head.append(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      for (const other of heads(table)) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      body.append(...[...rows].sort((a, b) => (up ? 1 : -1) * compare(text(a, column), text(b, column))));
    });
  });
  const style = document.createElement("style");
  style.textContent =
    "th button:hover, th button:focus-visible { text-decoration: underline }" +
    'th[aria-sort="ascending"] button::after { content: " \u25b2" } th[aria-sort="descending"] button::after { content: " \u25bc" }' +
    "label select { font: inherit; color: inherit; background: Canvas; border: 1px solid; padding: 0.1em 0.3em; margin-right: 1em }";
  document.head.append(style);
  filter();
})();

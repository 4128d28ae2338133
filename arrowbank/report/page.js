"use strict";
(() => {
  const byId = (id) => document.getElementById(id);

  // light and dark: what the system says, until the button is pressed
  const root = document.documentElement;
  const button = byId("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const showTheme = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", isDark() ? "Use light colours" : "Use dark colours");
  };
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    showTheme();
  });
  system.addEventListener("change", showTheme);
  showTheme();

  // the map
  const holder = byId("map-data");
  if (!holder) return;
  const data = JSON.parse(holder.textContent);
  const svg = byId("map-svg");
  const box = byId("map-box");
  const tip = byId("map-tip");
  const panel = byId("map-panel");
  const circles = [...byId("map-points").children];
  const places = circles.map((circle) => [circle.cx.baseVal.value, circle.cy.baseVal.value]);
  const trail = [];
  let chosen = -1;
  let grouping = data.groupings[0];

  // every text gets into the page through here: as text, never as HTML
  const make = (name, className, text) => {
    const element = document.createElement(name);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const draw = (name, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  };
  const described = (index) =>
    data.groupings.map((one) => one.groups[one.of[index]]).join(" · ") + ` · row ${data.rows[index].toLocaleString("en")}`;

  // colours
  const legend = byId("map-legend");
  const colour = () => {
    circles.forEach((circle, index) => circle.setAttribute("class", `point s${grouping.of[index]}`));
    legend.replaceChildren(
      ...grouping.groups.map((name, index) => {
        const item = make("li", `s${index}`);
        const swatch = draw("svg", { viewBox: "0 0 12 12", width: 12, height: 12, "aria-hidden": "true" });
        swatch.append(draw("circle", { class: "bar", cx: 6, cy: 6, r: 5 }));
        item.append(swatch, make("bdi", "", name));
        return item;
      }),
    );
    search();
  };
  for (const radio of document.querySelectorAll("input[name=map-colour]")) {
    radio.addEventListener("change", () => {
      grouping = data.groupings[Number(radio.value)];
      colour();
    });
  }

  // finding texts
  const field = byId("map-search");
  const search = () => {
    const wanted = field.value.trim().toLowerCase();
    let found = 0;
    circles.forEach((circle, index) => {
      const hit = wanted !== "" && data.texts[index].toLowerCase().includes(wanted);
      found += hit;
      circle.classList.toggle("hit", hit);
      circle.classList.toggle("dim", wanted !== "" && !hit);
    });
    byId("map-found").textContent = wanted === "" ? "" : `${found.toLocaleString("en")} found`;
  };
  field.addEventListener("input", search);
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || field.value.trim() === "") return;
    const hits = circles.map((circle, index) => (circle.classList.contains("hit") ? index : -1)).filter((index) => index >= 0);
    if (hits.length) choose(hits[(hits.indexOf(chosen) + 1) % hits.length]);
  });

  // choosing
  const choose = (index, { back = false } = {}) => {
    if (index === chosen) return;
    if (chosen >= 0 && !back) trail.push(chosen);
    chosen = index;
    const rings = byId("map-rings");
    const links = byId("map-links");
    const [x, y] = places[index];
    const inside = data.near[index].filter((other) => other < data.sampled);
    links.replaceChildren(...inside.map((other) => draw("line", { class: "link", x1: x, y1: y, x2: places[other][0], y2: places[other][1] })));
    rings.replaceChildren(
      ...inside.map((other) => draw("circle", { class: "ring", cx: places[other][0], cy: places[other][1], r: 5.5 })),
      draw("circle", { class: "ring chosen", cx: x, cy: y, r: 7.5 }),
    );
    show();
  };
  const goBack = () => {
    if (trail.length) choose(trail.pop(), { back: true });
  };
  const show = () => {
    const head = make("div", "row");
    head.append(make("span", "note", described(chosen)));
    if (trail.length) {
      const back = make("button", "", "Back");
      back.type = "button";
      back.addEventListener("click", goBack);
      head.append(back);
    }
    const text = make("p", "chosen");
    text.append(make("bdi", "", data.texts[chosen]));
    const list = make("ol");
    data.near[chosen].forEach((other, rank) => {
      const item = make("li");
      const drawn = other < data.sampled;
      const line = make(drawn ? "button" : "div", "near");
      const what = make("span", "what");
      what.append(make("bdi", "", data.texts[other]), make("small", "", described(other) + (drawn ? "" : " · not on the map")));
      line.append(make("span", "cosine", data.cosines[chosen][rank].toFixed(3)), what);
      line.dataset.row = data.rows[other];
      if (!drawn) line.tabIndex = 0; // its text is cut until it is looked at
      if (drawn) {
        line.type = "button";
        line.addEventListener("click", () => {
          choose(other);
          panel.scrollTop = 0;
        });
      }
      item.append(line);
      list.append(item);
    });
    panel.replaceChildren(head, text, make("h3", "", `Nearest of the whole bank, by cosine`), list);
    panel.dataset.row = data.rows[chosen];
  };

  // pointing
  const at = (event) => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const reach = 14 / svg.getScreenCTM().a; // pixels of the screen
    let best = -1;
    let least = reach * reach;
    places.forEach(([x, y], index) => {
      const away = (x - point.x) ** 2 + (y - point.y) ** 2;
      if (away < least) [best, least] = [index, away];
    });
    return best;
  };
  const cut = (text) => (text.length > 180 ? text.slice(0, 179) + "…" : text);
  svg.addEventListener("pointermove", (event) => {
    const index = event.pointerType === "mouse" ? at(event) : -1;
    tip.hidden = index < 0;
    if (index < 0) return;
    tip.textContent = cut(data.texts[index]);
    const frame = box.getBoundingClientRect();
    const x = event.clientX - frame.left;
    const y = event.clientY - frame.top;
    const left = x + 16 + tip.offsetWidth > frame.width ? x - tip.offsetWidth - 12 : x + 16;
    tip.style.left = `${Math.max(0, left)}px`;
    tip.style.top = `${Math.max(0, y - tip.offsetHeight - 10)}px`;
  });
  svg.addEventListener("pointerleave", () => {
    tip.hidden = true;
  });
  svg.addEventListener("click", (event) => {
    const index = at(event);
    if (index >= 0) choose(index);
  });

  // keys: the nearest point within 45 degrees of an arrow
  const arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const next = ([dx, dy]) => {
    if (chosen < 0) return 0;
    const [x0, y0] = places[chosen];
    let best = -1;
    let least = Infinity;
    places.forEach(([x, y], index) => {
      const along = (x - x0) * dx + (y - y0) * dy;
      const across = Math.abs((x - x0) * dy) + Math.abs((y - y0) * dx);
      if (index !== chosen && along > 0 && across <= along && along + across < least) [best, least] = [index, along + across];
    });
    return best;
  };
  box.addEventListener("keydown", (event) => {
    if (event.key in arrows) {
      const index = next(arrows[event.key]);
      if (index >= 0) choose(index);
    } else if (event.key === "Enter" && chosen >= 0) {
      const other = data.near[chosen].find((index) => index < data.sampled);
      if (other !== undefined) choose(other);
    } else if (event.key === "Backspace") {
      goBack();
    } else {
      return;
    }
    event.preventDefault();
  });

  // the table, when it is asked for
  const table = byId("map-table");
  table.addEventListener("toggle", () => {
    const place = table.querySelector(".scroll");
    if (!table.open || place.firstChild) return;
    const grid = make("table");
    const heads = make("tr");
    for (const name of ["row", ...data.groupings.map((one) => one.name), "first", "second", "text"]) {
      const cell = make("th", "", name);
      cell.scope = "col";
      heads.append(cell);
    }
    grid.append(make("thead"), make("tbody"));
    grid.tHead.append(heads);
    for (let index = 0; index < data.sampled; index++) {
      const line = make("tr");
      line.append(make("td", "n", String(data.rows[index])));
      for (const one of data.groupings) line.append(make("td", "", one.groups[one.of[index]]));
      for (const value of data.places[index]) line.append(make("td", "n", value.toFixed(3)));
      const cell = make("td");
      cell.append(make("bdi", "", cut(data.texts[index])));
      line.append(cell);
      grid.tBodies[0].append(line);
    }
    place.append(grid);
  });

  colour();
})();

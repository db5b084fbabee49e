// Shows the view that the hash names, and handles keys.
{
  const sections = [...document.querySelectorAll("main > section")];

  const views = {
    overview: ["overview", page.overview],
    "held-out": ["held-out", page.heldOut],
    training: ["training", page.training],
    settings: ["settings", () => {}],
  };

  const show = async () => {
    const state = page.route();
    let [id, draw] = views[state.view] ?? views.overview;
    if (state.it !== undefined) [id, draw] = ["sample", page.group];
    if (state.eval !== undefined) [id, draw] = state.id ? ["sample", page.heldOutSample] : views["held-out"];
    page.neighbours = [];
    for (const section of sections) section.hidden = section.id !== `at-${id}`;
    for (const link of document.querySelectorAll("nav a")) {
      const current = state.it !== undefined ? "training" : state.eval !== undefined ? "held-out" : id;
      if (link.hash === `#${current}`) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    window.scrollTo(0, 0);
    await draw(state);
    if (id === "sample") document.getElementById("sample-title")?.focus({preventScroll: true});
  };

  // The links that j and k step through in a list.
  const listLinks = () => [...document.querySelectorAll("section:not([hidden]) :is(.card h3 a, .groups tbody a)")];

  const step = (by) => {
    const neighbour = page.neighbours[by < 0 ? 0 : 1];
    if (neighbour) { location.hash = neighbour; return; }
    const links = listLinks();
    if (!links.length) return;
    const now = links.indexOf(document.activeElement);
    const next = links[now < 0 ? (by > 0 ? 0 : links.length - 1) : Math.min(links.length - 1, Math.max(0, now + by))];
    next.focus();
    next.scrollIntoView({block: "center"});
  };

  const back = () => {
    const {it, eval: evaluation, view} = page.route();
    if (it !== undefined) location.hash = "#training";
    else if (evaluation !== undefined) location.hash = "#held-out";
    else if (view !== "overview") location.hash = "#overview";
  };

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target.matches?.("input, select, textarea");
    if (event.key === "Escape") {
      if (typing) event.target.blur(); else back();
    } else if (typing) {
      return;
    } else if (event.key === "j" || event.key === "ArrowRight") step(1);
    else if (event.key === "k" || event.key === "ArrowLeft") step(-1);
    else if (event.key === "/") {
      const search = document.querySelector("section:not([hidden]) input[type=search]");
      if (search) search.focus();
      else { location.hash = "#held-out"; return; }
      event.preventDefault();
    }
  });

  // On a narrow screen the content comes first.
  if (innerWidth <= 640) for (const form of document.querySelectorAll("form, .parts")) form.parentNode.open = false;
  window.addEventListener("hashchange", show);
  show();
}

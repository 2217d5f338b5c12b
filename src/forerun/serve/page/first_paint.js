// What must be known before the first paint: the theme, and whether the sidebar is shown. The rest is in main.js.
(() => {
  try {
    const look = JSON.parse(localStorage.getItem("forerun.look") || "{}");
    if (look.theme === "light" || look.theme === "dark") document.documentElement.dataset.theme = look.theme;
    if (look.sidebar === false) document.documentElement.dataset.sidebar = "hidden";
  } catch {
    // Storage may be switched off; then the page looks as the system does.
  }
})();

"""The contents at the side open where the page stands in them, which on a long list is out of sight."""

SCROLL = """
document.addEventListener("DOMContentLoaded", () => {
  const contents = document.querySelector(".bd-sidebar-primary");
  const here = contents?.querySelector(".toctree-l1.current > a");
  if (here) contents.scrollTop += here.getBoundingClientRect().top - contents.clientHeight / 2;
});
"""


def setup(app):
    app.add_js_file(None, body=SCROLL)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}

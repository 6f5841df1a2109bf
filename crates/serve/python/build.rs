//! Lets the linker of macOS accept the symbols of Python, which are there when it loads the module.

fn main() {
    pyo3_build_config::add_extension_module_link_args();
}

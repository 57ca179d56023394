//! The environment of every process that the agent starts, under either init.

use std::path::Path;

use mercury_lab_agent::{LAB_DIR, PATH};

use crate::cmdline::Cmdline;

/// Returns the search path, the home directory, and the place of `mercury`'s driver: `lab.modules=`
/// names the directory of the machine's variant.
pub fn variables() -> Vec<(&'static str, String)> {
    let mut variables =
        vec![("PATH", PATH.to_owned()), ("HOME", "/root".to_owned()), ("LANG", "C.UTF-8".to_owned())];
    let cmdline = Cmdline::read();
    let directory = cmdline.get("modules").unwrap_or("modules");
    let module = format!("{LAB_DIR}/lib/{directory}/{}/mercury.ko", kernel_release());
    if Path::new(&module).exists() {
        variables.push(("MERCURY_MODULE", module));
    }
    variables
}

/// Returns the version that `uname -r` prints.
pub fn kernel_release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

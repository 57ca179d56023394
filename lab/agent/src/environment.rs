//! The environment of all that the agent starts, under either init.

use std::path::Path;

use mercury_lab_agent::{LAB_DIR, PATH};

use crate::cmdline::Cmdline;

/// Search path, home, and where `mercury` finds its driver: `lab.modules=` names the directory of the
/// variant that the machine is to use.
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

/// What `uname -r` says.
pub fn kernel_release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

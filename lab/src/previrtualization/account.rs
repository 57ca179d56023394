//! The account of a built kernel: the kernel that a small one replaces, and the afterburner's verdict on its
//! slots.

use std::process::Command;

use serde_json::Value;

use super::Built;
use crate::{
    error::{Error, Result},
    image::Release,
    kernel::Kernel,
};

/// Returns the report of `afterburner verify` about a kernel and its modules.
///
/// # Errors
/// If an instruction is not accounted for.
pub fn account(built: &Built) -> Result<Value> {
    let mut verify = Command::new(&built.afterburner);
    verify.args(["verify", "--json"]).arg(&built.vmlinux).args(&built.modules);
    let output =
        verify.output().map_err(|error| Error::Host(format!("cannot start the afterburner: {error}")))?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(Error::Host(format!("`afterburner verify` found errors: {said}{text}")));
    }
    serde_json::from_str(&text)
        .map_err(|error| Error::Host(format!("`afterburner verify` printed no JSON: {error}")))
}

/// Returns the Debian kernel whose place a small kernel takes.
#[must_use]
pub fn kernel_of(release: Release) -> Kernel {
    match release {
        Release::Bookworm => Kernel::BookwormCloud,
        Release::Trixie => Kernel::TrixieCloud,
    }
}

//! What machines run in: QEMU, or Bochs. Each has one file that turns a [`Spec`] into something to start; what
//! comes out of both is a process, a serial log, and a stream to the agent inside.
//!
//! QEMU has a monitor ([`qmp`]), virtio and NVMe, and runs several processors at once. Bochs is some five
//! times slower and has none of that, but it has Intel's processors with VMX, and another opinion on AMD's.

pub mod bochs;
pub mod bochs_build;
pub mod newer_qemu;
pub mod qemu;
pub mod qmp;
mod repaired_qemu;

use std::{
    net::TcpListener,
    path::{Path, PathBuf},
};

use crate::{
    error::{Error, Result},
    scene::Scene,
    spec::{Platform, Spec},
};

/// The files that a machine is booted from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Files<'a> {
    pub vmlinuz: &'a Path,
    pub initramfs: &'a Path,
    pub root_disk: &'a Path,
    pub lab_disk: &'a Path,
}

/// What to start in a machine's directory.
#[derive(Debug)]
pub(crate) struct Start {
    pub program: PathBuf,
    pub arguments: Vec<String>,
    pub agent: AgentSocket,
}

/// Where the agent's stream comes out.
#[derive(Debug)]
pub(crate) enum AgentSocket {
    /// The emulator listens on a Unix socket in the machine's directory.
    Unix(&'static str),
    /// The emulator connects to us.
    Tcp(TcpListener),
}

/// Names of a machine's own files, in its directory, which is the emulator's working directory.
pub(crate) mod file {
    pub const ROOT: &str = "root.qcow2";
    /// What UEFI keeps.
    pub const VARIABLES: &str = "variables.img";
    pub const SERIAL: &str = "serial.log";
    pub const AGENT: &str = "agent.sock";
    pub const CONSOLE: &str = "console.sock";
    pub const MONITOR: &str = "qmp.sock";
    /// What was started.
    pub const COMMAND: &str = "command";
    /// What the emulator itself has said.
    pub const EMULATOR: &str = "emulator.log";
    /// Its processors' resets, and what they had in their registers (QEMU).
    pub const RESETS: &str = "resets.log";

    pub fn disk(index: usize) -> String {
        format!("disk{index}.qcow2")
    }
}

/// Makes what the machine needs in its directory, and says what to start there.
///
/// # Errors
/// If a disk cannot be made, or the emulator that the machine wants.
pub(crate) fn prepare(spec: &Spec, files: Files<'_>, scene: &Scene) -> Result<Start> {
    match spec.platform {
        Platform::Qemu => qemu::prepare(spec, files, scene),
        Platform::Bochs(model) => bochs::prepare(spec, model, files, scene),
    }
}

/// Says what to start with the disks that are there: another machine gets them.
///
/// # Errors
/// If it is to run in Bochs, or the QEMU that it wants cannot be made.
pub(crate) fn prepare_again(spec: &Spec, files: Files<'_>) -> Result<Start> {
    match spec.platform {
        Platform::Qemu => qemu::start(spec, files),
        Platform::Bochs(_) => Err(Error::Unsupported { reason: "Bochs has no disks to spare" }),
    }
}

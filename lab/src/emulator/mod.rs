//! The emulators of machines: QEMU and Bochs. Each has one file that turns a [`Spec`] into a
//! command to start. Both give a process, a serial log, and a stream to the agent inside.
//!
//! QEMU has a monitor ([`qmp`]), virtio and NVMe, and runs several processors at once. Bochs is
//! some five times slower and has none of these. But it has Intel's processors with VMX, and is a
//! second, independent model of AMD's.

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

/// The files from which a machine boots.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Files<'a> {
    pub vmlinuz: &'a Path,
    pub initramfs: &'a Path,
    pub root_disk: &'a Path,
    pub lab_disk: &'a Path,
}

/// The command to start in a machine's directory.
#[derive(Debug)]
pub(crate) struct Start {
    pub program: PathBuf,
    pub arguments: Vec<String>,
    pub agent: AgentSocket,
}

/// The place where the agent's stream comes out.
#[derive(Debug)]
pub(crate) enum AgentSocket {
    /// The emulator listens on a Unix socket in the machine's directory.
    Unix(&'static str),
    /// The emulator connects to the lab.
    Tcp(TcpListener),
}

/// Names of a machine's own files in its directory, which is the emulator's working directory.
pub(crate) mod file {
    pub const ROOT: &str = "root.qcow2";
    /// The variables that UEFI keeps.
    pub const VARIABLES: &str = "variables.img";
    pub const SERIAL: &str = "serial.log";
    pub const AGENT: &str = "agent.sock";
    pub const CONSOLE: &str = "console.sock";
    pub const MONITOR: &str = "qmp.sock";
    /// The streams of a guest's agent and of its console, through ports of its host.
    pub const GUEST_AGENT: &str = "guest-agent";
    pub const GUEST_CONSOLE: &str = "guest-console";
    /// The command that was started.
    pub const COMMAND: &str = "command";
    /// The emulator's own output.
    pub const EMULATOR: &str = "emulator.log";
    /// The resets of the processors, and their registers then (QEMU).
    pub const RESETS: &str = "resets.log";

    pub fn disk(index: usize) -> String {
        format!("disk{index}.qcow2")
    }
}

/// Makes the emulator of the chosen platform, if it is missing.
///
/// # Errors
/// If the emulator cannot be made.
pub(crate) fn ensure() -> Result<()> {
    match Platform::chosen()? {
        Platform::Qemu => newer_qemu::ensure().map(drop),
        Platform::Bochs(_) => bochs_build::ensure().map(drop),
    }
}

/// Makes the machine's files in its directory. Returns the command to start there.
///
/// # Errors
/// If a disk or the machine's emulator cannot be made.
pub(crate) fn prepare(spec: &Spec, files: Files<'_>, scene: &Scene) -> Result<Start> {
    match spec.platform {
        Platform::Qemu => qemu::prepare(spec, files, scene),
        Platform::Bochs(model) => bochs::prepare(spec, model, files, scene),
    }
}

/// Returns the command to start with the disks of another machine, which exist already.
///
/// # Errors
/// If the machine is to run in Bochs, or its QEMU cannot be made.
pub(crate) fn prepare_again(spec: &Spec, files: Files<'_>) -> Result<Start> {
    match spec.platform {
        Platform::Qemu => qemu::start(spec, files),
        Platform::Bochs(_) => {
            Err(Error::Unsupported { reason: "Bochs starts on no disks of another machine" })
        }
    }
}

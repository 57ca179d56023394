//! The agreements between the host and a lab machine: their protocol and the names of things.
//!
//! The program itself (`main.rs`) is the machine's first process. The host links this library too.

#![allow(missing_docs)]

pub mod protocol;

/// The name of the virtio-serial port that the protocol runs over.
pub const PORT_NAME: &str = "mercury.lab";
/// The ext4 label of the root disk.
pub const ROOT_LABEL: &str = "mercury-root";
/// The ext4 label of the disk that carries the project's artefacts, mounted at [`LAB_DIR`].
pub const LAB_LABEL: &str = "mercury-lab";
/// The mount point of the artefacts in the machine.
pub const LAB_DIR: &str = "/mercury";
/// The search path of every process that the agent starts.
pub const PATH: &str = "/mercury/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

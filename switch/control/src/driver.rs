//! The requests of the commands to the kernel module, as a trait. The file `device.rs` implements it for the
//! real module, and tests bring modules of their own.

use crate::{cpus::CpuSet, error::Result};
use mercury_abi::{
    facts::CpuFacts,
    ioctl::{CpuStatus, FaultRequest, MeasureRequest, SwitchResult, SystemInfo},
    shared::SharedCpu,
};

/// Direction of a mode switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From native to attached.
    Attach,
    /// From attached to native.
    Detach,
}

impl Direction {
    /// Returns the name of the operation.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Attach => "attach",
            Self::Detach => "detach",
        }
    }

    /// Returns the participle of the operation.
    #[must_use]
    pub fn past(self) -> &'static str {
        match self {
            Self::Attach => "attached",
            Self::Detach => "detached",
        }
    }
}

/// The kernel module.
pub trait Driver {
    /// Returns the facts about the driver and the machine.
    fn system(&self) -> Result<SystemInfo>;
    /// Returns everything that can be read of one CPU; `None` if it is offline.
    fn facts(&self, cpu: u32) -> Result<Option<CpuFacts>>;
    /// Pre-caches the hypervisor.
    fn load(&self) -> Result<()>;
    /// Frees the hypervisor.
    fn unload(&self) -> Result<()>;
    /// Switches the given CPUs, or all that are online.
    fn switch(&self, direction: Direction, cpus: Option<&CpuSet>) -> Result<Vec<SwitchResult>>;
    /// Switches CPUs, and leaves it as it is whether CPUs attach that come online later.
    fn switch_for_now(&self, direction: Direction, cpus: &CpuSet) -> Result<()>;
    /// Returns the modes of all possible CPUs, asked of each CPU.
    fn status(&self) -> Result<Vec<CpuStatus>>;
    /// Measures hypercall round trips on one attached CPU.
    fn measure(&self, cpu: u32, count: u32) -> Result<MeasureRequest>;
    /// Arms a fault point and returns how many have fired since load.
    fn fault(&self, request: FaultRequest) -> Result<u32>;
    /// Copies the blocks that the hypervisor publishes, one per possible CPU; empty while it is not
    /// loaded.
    fn shared(&self) -> Result<Vec<SharedCpu>>;
}

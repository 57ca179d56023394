//! What the commands ask of the kernel module, as a trait: [`crate::device::Device`] is the real
//! one, and the tests bring their own.

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
    /// The name of the operation.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Attach => "attach",
            Self::Detach => "detach",
        }
    }

    /// The operation, done.
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
    /// What the driver and the machine are.
    fn system(&self) -> Result<SystemInfo>;
    /// Everything that can be read of one CPU; `None` if it is offline.
    fn facts(&self, cpu: u32) -> Result<Option<CpuFacts>>;
    /// Pre-caches the hypervisor.
    fn load(&self) -> Result<()>;
    /// Frees it.
    fn unload(&self) -> Result<()>;
    /// Switches the given CPUs, or all that are online.
    fn switch(&self, direction: Direction, cpus: Option<&CpuSet>) -> Result<Vec<SwitchResult>>;
    /// The modes of all possible CPUs, asked of each of them.
    fn status(&self) -> Result<Vec<CpuStatus>>;
    /// Hypercall round trips on one attached CPU.
    fn measure(&self, cpu: u32, count: u32) -> Result<MeasureRequest>;
    /// Arms a fault point and returns how many have fired since load.
    fn fault(&self, request: FaultRequest) -> Result<u32>;
    /// Copies of what the hypervisor publishes, one block per possible CPU; empty while unloaded.
    fn shared(&self) -> Result<Vec<SharedCpu>>;
}

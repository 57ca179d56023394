//! Virtio devices with registers in memory (virtio-mmio), for monitors of virtual machines: disks, network
//! cards, a source of randomness, and one that takes unused memory back. Beside them, two devices of a PC:
//! the clock and a serial port.
//!
//! The devices know a guest's memory as [`memory::View`], which may have several regions. They know
//! nothing of processors and interrupt controllers: [`virtio::Transport`] returns true when the driver
//! is to be interrupted, and [`signals::Waker`] tells the monitor that a device has work.

// Names of registers and fields need no sentence.
#![allow(missing_docs)]

mod agent;
mod balloon;
mod bell;
mod block;
pub mod clock;
pub mod error;
#[doc(hidden)]
pub mod fuzz;
mod link;
pub mod memory;
mod net;
mod pmem;
mod requests;
mod rng;
pub mod serial;
pub mod signals;
pub mod state;
mod subnet;
pub mod terminal;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod testing;
mod uplink;
pub mod virtio;

pub use agent::{Agent, Gate, Identity, NAME as AGENT};
pub use balloon::{Balloon, Size};
pub use bell::Bell;
pub use block::{Block, open_disk, time_of_change};
pub use net::{Net, Witness};
pub use pmem::Pmem;
pub use rng::Rng;
pub use subnet::{Joined as JoinedSubnet, SubnetCard, SubnetOption, start_keeper};
pub use uplink::{NetOption, Opened as OpenUplink};

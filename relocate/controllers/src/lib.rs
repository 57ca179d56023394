//! Storage controllers as bare machines have them. A kernel that goes on as a guest finds its controller at
//! its old place, and goes on with the driver that it had.
//!
//! The crate is logic over three traits: [`Memory`] of the guest, a [`Disk`], and [`Interrupts`]. It starts
//! no thread and knows no monitor. Everything that a guest writes is untrusted.
//!
//! - [`pci`]: the configuration space of a function, and its messages (MSI, MSI-X).
//! - [`nvme`]: an NVMe controller. Its registers belong to processors; its queues belong to one thread of
//!   the monitor, so that no processor waits for a disk.
//! - [`ahci`]: an AHCI controller with SATA disks, in the same form.
//! - [`disk`]: a disk in a file or a block device.

pub mod ahci;
pub mod disk;
#[doc(hidden)]
pub mod fuzz;
mod gate;
pub mod nvme;
mod parts;
pub mod pci;
mod testing;

pub use disk::Disk;

/// The guest's memory.
pub trait Memory {
    /// Copies out of the memory. Returns nothing if a part of the range is no memory.
    fn read(&self, at: u64, into: &mut [u8]) -> Option<()>;
    /// Copies into the memory. Returns nothing if a part of the range is no memory.
    fn write(&self, at: u64, bytes: &[u8]) -> Option<()>;
}

impl<M: Memory + ?Sized> Memory for &M {
    fn read(&self, at: u64, into: &mut [u8]) -> Option<()> {
        (**self).read(at, into)
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Option<()> {
        (**self).write(at, bytes)
    }
}

/// The way of a controller's interrupts.
pub trait Interrupts {
    /// Raises one of the controller's vectors.
    fn raise(&self, vector: u16);
    /// Sets the level of the controller's line. It has one if it does without messages.
    fn level(&self, _is_high: bool) {}
}

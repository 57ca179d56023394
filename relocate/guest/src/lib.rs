//! The machine of a checkpoint as a guest of KVM, on a host that has none of its hardware.
//!
//! The guest's memory lies at the machine's physical addresses. Each processor begins in the resume code
//! of the kernel in the image, with the registers that the image holds. From there the kernel restores
//! itself as on bare metal. Its own devices are gone; the driver in the image finds virtio devices of the
//! monitor in their place ([`mercury_abi::guest`]).
//!
//! - [`image`] opens an image, and loads it into the guest's memory. [`fit`] names what stands against
//!   this host. Both trust nothing in the image.
//! - [`disks`] opens the contents of the machine's own disks, and compares them with the image.
//! - [`layout`] decides where the guest has memory. [`memory`] gives it to KVM.
//! - [`acpi`] finds the ports of the machine's platform in the firmware's tables.
//! - [`entry`] and [`cpu`] make the state in which a processor begins. [`time`] sets KVM's clocks.
//! - [`platform`]: the devices that a running kernel touches, and virtio's.
//! - `sandbox` gives up what the monitor needs no more, before a processor begins.
//! - [`wires`]: sockets of serial ports. [`run`] does these in order, and ends the guest.

// Names of fields need no sentence.
#![allow(missing_docs)]
// Ranges of addresses stand in lists.
#![allow(clippy::single_range_in_vec_init)]

pub mod acpi;
mod calls;
mod clones;
pub mod cpu;
pub mod disks;
pub mod entry;
mod features;
pub mod fit;
#[doc(hidden)]
pub mod fuzz;
pub mod image;
pub mod layout;
pub mod memory;
pub mod platform;
pub mod run;
mod sandbox;
pub mod time;
pub mod wires;

/// What to do if the host has no room for another thread or descriptor.
pub const SHORT_OF: &str =
    "raise the limits of processes and open files (`ulimit -a`), or end other programs";

/// What to do if the folder of the guest's state takes no file.
pub const FOLDER: &str = "make room in /run, or in $XDG_RUNTIME_DIR";

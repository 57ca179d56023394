//! The one place where hypervisor, driver and command meet.
//!
//! * [`ioctl`]: what user space asks of the driver through `/dev/mercury`;
//! * [`facts`]: everything that a preflight check or a before/after comparison reads of a processor;
//! * [`shared`]: counters, crash records and the log, written by the hypervisor and mapped read-only
//!   by user space;
//! * [`gate`]: what the driver hands to the hypervisor at load, and the per-CPU area in which both
//!   worlds keep a processor's state while it changes sides;
//! * [`snapshot`]: what memory held at one instant; [`restart`]: bringing it back;
//! * [`code`]: the stable codes of every refusal; [`refusal`]: why VMX refused an entry.
//!
//! Every structure that crosses from user space carries its size and version in a [`Header`]; a
//! mismatch is refused with [`code::Code::AbiMismatch`], never misread. The driver's
//! `mercury_abi.h` is generated from this crate; a test keeps the two equal.
//!
//! Address kinds are named in each field: `_phys` is host-physical (equal to guest-physical: the
//! nested mapping is the identity), `_virt` is a kernel virtual address.

#![no_std]

pub mod code;
pub mod facts;
pub mod gate;
pub mod ioctl;
pub mod refusal;
pub mod restart;
pub mod shared;
pub mod snapshot;

/// Version of everything in this crate. Raised with every change of a layout or a meaning.
pub const MERCURY_ABI_VERSION: u32 = 8;

/// Size and version, at the start of every structure that user space passes to the driver.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Size in bytes of the whole structure as the caller knows it.
    pub size: u32,
    /// [`MERCURY_ABI_VERSION`] as the caller knows it.
    pub version: u32,
}

impl Header {
    /// The header of a structure of type `T`.
    #[must_use]
    pub const fn of<T>() -> Self {
        Self { size: size_of::<T>() as u32, version: MERCURY_ABI_VERSION }
    }
}

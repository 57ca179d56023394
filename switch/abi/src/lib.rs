//! The interface between the hypervisor, the driver and the command: the one crate that all three
//! use.
//!
//! - [`ioctl`]: the requests of user space to the driver through `/dev/mercury`;
//! - [`facts`]: the registers and CPUID leaves of a processor, for preflight checks and for
//!   comparisons;
//! - [`shared`]: counters, crash records and the log, which the hypervisor writes and user space
//!   maps read-only;
//! - [`gate`]: the memory that the driver hands to the hypervisor at load, and the per-CPU area
//!   that holds a processor's state during a switch;
//! - [`snapshot`]: the memory's content at one instant; [`restart`]: the restart of a machine from
//!   it; [`guest`]: its devices when it goes on as a guest;
//! - [`code`]: the stable code of each refusal; [`refusal`]: the reasons why VMX refuses an entry.
//!
//! Every structure that crosses from user space carries its size and version in a [`Header`]. The
//! driver refuses a mismatch with [`code::Code::AbiMismatch`] and never misreads one. The driver's
//! `mercury_abi.h` is generated from this crate, and a test keeps the two equal.
//!
//! Units and addresses:
//!
//! - A field whose name ends in `_phys` holds a host-physical address, in bytes. In the identity
//!   map it equals the guest-physical address, so the same field serves both kinds.
//! - `_virt` is a kernel virtual address. In the hypervisor's own memory it equals the host-virtual
//!   one.
//! - `_addr` is an address of the calling process. 0 means "none" where the field says so.
//! - A page or frame is 4 KiB. `_ticks` counts cycles of the time-stamp counter (TSC).
//! - A CPU number is Linux's number, from 0 up to [`ioctl::SystemInfo::possible_cpus`] less one.

#![no_std]

pub mod code;
pub mod facts;
pub mod gate;
pub mod guest;
pub mod ioctl;
pub mod refusal;
pub mod restart;
pub mod shared;
pub mod snapshot;

/// Version of every layout and meaning in this crate. Each change of one of them raises the
/// version.
pub const MERCURY_ABI_VERSION: u32 = 13;

/// Size and version of a structure. Every structure that user space passes to the driver begins
/// with them.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Size in bytes of the whole structure as the caller knows it.
    pub size: u32,
    /// [`MERCURY_ABI_VERSION`] of the caller's build.
    pub version: u32,
}

impl Header {
    /// Returns the header of a structure of type `T`.
    #[must_use]
    pub const fn of<T>() -> Self {
        Self { size: size_of::<T>() as u32, version: MERCURY_ABI_VERSION }
    }
}

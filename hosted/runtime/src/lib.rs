//! The hosted machine: a pre-virtualized Linux kernel as an ordinary process of a Linux host. It
//! needs no hardware virtualization, no privileges, no `ptrace` and no changes of the host.
//!
//! The kernel's image is moved to addresses that a process can have. The slots that the afterburner
//! made in it are filled with jumps to code that works on a processor's state in memory. A signal
//! handler maps the pages that the kernel's page tables map. System calls of the guest's programs
//! come as signals. Guest kernel, guest programs and this monitor share one address space, so the
//! kernel is not protected from its programs. Programs in processes of their own are the exception.
//! The monitor is never protected from the kernel.
//!
//! - [`layout`]: the address space.
//! - [`kernel`] reads the `vmlinux`. [`load`] moves it and fills its slots ([`thunks`],
//!   [`constants`]). [`loader`] does this in a process of its own. [`boot`] tells the kernel about
//!   its machine. [`run`] does these in order, after `limits` has checked the host.
//! - [`machine`]: faults, interrupts and emulated instructions, on [`vcpu`], with [`mmu`] for page
//!   tables and [`cpuid`].
//! - [`entry`] and [`signal`]: the ways from the guest to the monitor and back. [`block`] is the
//!   memory that they share with slots. [`selectors`] stay in the CPU.
//! - [`sites`] decides how programs' system calls are rewritten, in [`patched`] copies of their
//!   pages.
//! - [`process`]: the processes of the machine, and which of them show address spaces.
//! - [`isolation`]: programs in processes of their own. [`user_access`] checks the addresses that
//!   the kernel uses for them.
//! - [`saved`]: a machine as a file. [`template`]: machines that begin as copies of one. [`fork`]:
//!   copies of a machine that runs.
//! - [`smp`]: several processors, each a process.
//! - [`devices`]: the devices of a small PC. [`gdb`]: a debugger. `sandbox`: the rights that remain
//!   once the guest runs.

// Names of registers and fields need no sentence.
#![allow(missing_docs)]

pub mod asleep;
pub mod block;
pub mod boot;
pub mod constants;
pub mod control;
pub mod cpuid;
pub mod devices;
pub mod entry;
pub mod fork;
#[doc(hidden)]
pub mod fuzz;
pub mod gdb;
pub mod generator;
pub mod heap;
pub mod isolation;
pub mod kernel;
pub mod layout;
mod limits;
pub mod load;
pub mod loader;
pub mod machine;
pub mod memory;
pub mod mmu;
pub mod patched;
pub mod process;
pub mod region;
pub mod run;
mod sandbox;
pub mod saved;
pub mod selectors;
pub mod signal;
pub mod sites;
pub mod smp;
pub mod template;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod testing;
pub mod throttle;
pub mod thunks;
pub mod user_access;
pub mod vcpu;

pub use mercury_devices::error;

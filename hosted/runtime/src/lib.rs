//! The hosted machine: a pre-virtualized Linux kernel as an ordinary process of a Linux host, without hardware
//! virtualization, privileges, `ptrace` or changes of the host.
//!
//! The kernel's image is moved to where a process can have it, and the slots that the afterburner made in it are filled with
//! jumps to code that works on the state of a processor in memory. What the kernel maps, a signal handler maps. Its
//! programs' system calls come as signals. Guest kernel, guest programs and this monitor share one address space,
//! unless programs are asked to be in processes of their own: otherwise the kernel is not protected from its programs. The
//! monitor is never protected from the kernel.
//!
//! - [`layout`]: where everything is.
//! - [`kernel`] reads the `vmlinux`, [`load`] moves it and fills its slots ([`thunks`], [`constants`]), [`boot`] tells it what
//!   it runs on, [`run`] does these in order, unless the host's `limits` are in the way.
//! - [`machine`] is left for and gone back to through [`entry`] and [`signal`]; [`block`] is what they share with slots.
//! - [`machine`] does what sensitive instructions do, on [`vcpu`], with [`mmu`] for page tables and [`cpuid`].
//! - [`sites`] decides how programs' system calls are rewritten, in [`patched`] copies of their pages.
//! - [`isolation`]: if it is asked for, programs run in processes of their own; [`user_access`] keep the kernel's own accesses from
//!   what is not theirs.
//! - [`process`]: otherwise each address space has a process, in which what it has mapped stays mapped.
//! - [`smp`]: more processors than one, each a process.
//! - [`devices`]: those of a small PC. [`gdb`]: a debugger. `sandbox`: what is left of the host once the guest runs.

pub mod block;
pub mod boot;
pub mod constants;
pub mod cpuid;
pub mod devices;
pub mod entry;
pub mod error;
#[doc(hidden)]
pub mod fuzz;
pub mod gdb;
pub mod isolation;
pub mod kernel;
pub mod layout;
mod limits;
pub mod load;
pub mod machine;
pub mod memory;
pub mod mmu;
pub mod patched;
pub mod process;
pub mod run;
mod sandbox;
pub mod signal;
pub mod sites;
pub mod smp;
pub mod thunks;
pub mod user_access;
pub mod vcpu;

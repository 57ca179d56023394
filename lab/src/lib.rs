//! The lab makes and boots the machines that Mercury's tests, its demo and its developers use. They
//! are stock Debian kernels in QEMU's software emulation, with AMD's SVM and nested paging, on any
//! host.
//!
//! ```no_run
//! use mercury_lab::{Kernel, Machine, Spec};
//!
//! # fn main() -> mercury_lab::Result<()> {
//! let machine = Machine::boot(Spec::new(Kernel::BookwormCloud).cpus(4).memory_mib(1024))?;
//! assert_eq!(machine.sh("nproc")?, "4");
//! machine.shut_down()
//! # }
//! ```
//!
//! From the bottom up:
//!
//! - `apt` finds the package mirror.
//! - `image` makes a root disk and a build root of a Debian release.
//! - `kernel` finds the release's kernels and packs an initramfs.
//! - `driver` and `artefacts` build the project and put it on a disk.
//! - `spec` describes a machine.
//! - `machine` runs the machine in an `emulator`. Its `client` speaks to the agent inside (see the
//!   crate `mercury-lab-agent`).

#![allow(missing_docs)]

pub mod apt;
pub mod artefacts;
pub mod as_guest;
mod autopsy;
pub mod check;
mod checkpatch;
pub mod client;
mod columns;
pub mod command;
pub mod deb;
pub mod disks;
pub mod driver;
pub mod emulator;
pub mod error;
pub mod footprint;
pub mod guard;
pub mod guests;
pub mod hash;
pub mod host;
pub mod hosted;
mod hung;
pub mod hypervisor;
pub mod image;
pub mod iommu;
pub mod java;
pub mod kernel;
pub mod ledger;
pub mod link;
pub mod live;
pub mod lkdtm;
pub mod loaders;
pub mod lock;
pub mod machine;
pub mod markdown;
pub mod moments;
pub mod moving;
pub mod operator;
pub mod owner;
pub mod pages;
pub mod pair;
pub mod paths;
pub mod previrtualization;
pub mod progress;
mod reservation;
pub mod restart;
pub mod round_trip;
pub mod scene;
pub mod selftests;
pub mod sizes;
pub mod spec;
mod terminal;
pub mod testing;
pub mod testmod;
mod tsc;

pub use command::{Background, Output, Stream};
pub use disks::{Cache, Disk, Disks};
pub use driver::Variant;
pub use emulator::qmp::{MachineCheck, Qmp};
pub use error::{Error, Result};
pub use image::{Image, Release};
pub use iommu::Iommu;
pub use kernel::Kernel;
pub use link::{Link, System};
pub use loaders::Loader;
pub use machine::{Boot, Machine};
pub use mercury_lab_agent::protocol::Exit;
pub use moments::Moments;
pub use reservation::Reservation;
pub use spec::{Bus, Console, Icount, Init, Model, Nic, Platform, Qemu, Reset, Spec, Vendor};
pub use testing::is_full;

//! The library with which user space drives `/dev/mercury` and talks to the operator.
//!
//! * [`driver`]: requests to the kernel module, as a trait; [`device`] sends them to `/dev/mercury`;
//! * [`module`] loads and removes the kernel module, and [`access`] opens the device for a command;
//! * [`switch`], [`status`], [`log`], [`facts`], [`rollback`], [`watch`]: reports on a switch, the CPUs, the
//!   hypervisor, a snapshot, and the watch for hangs;
//! * [`explain`], [`bits`], [`svm`], [`vmx`]: codes, bits and exits in words;
//! * [`processor`], [`cpus`], [`sysroot`], [`lockdown`]: facts about this machine that need no driver;
//! * [`error`], [`exit`], [`output`], [`say`], [`progress`], [`interrupt`], [`journal`], [`history`]: results
//!   and failures for people, scripts, systemd and `mercury metrics`.
//!
//! Unsafe code is in [`device`] (the kernel's interface), [`interrupt`] (signal handlers) and [`tsc`].

#![allow(missing_docs)]

pub mod access;
pub mod bits;
pub mod cpus;
pub mod device;
pub mod driver;
pub mod error;
pub mod exit;
pub mod explain;
pub mod facts;
#[cfg(any(test, feature = "fake"))]
pub mod fake;
pub mod history;
pub mod interrupt;
pub mod journal;
pub mod lockdown;
pub mod log;
pub mod module;
pub mod monitor;
pub mod msr;
pub mod output;
pub mod processor;
pub mod progress;
pub mod rollback;
pub mod say;
pub mod size;
pub mod span;
pub mod stats;
pub mod status;
pub mod sudo;
pub mod svm;
pub mod switch;
pub mod sysroot;
pub mod tsc;
pub mod vmx;
pub mod watch;

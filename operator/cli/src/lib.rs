//! The library half of the `mercury` command.
//!
//! * [`args`]: the command line; [`help`]: its help, and with [`generate`] manual pages and
//!   completions;
//! * [`commands`]: each command opens the driver, does one thing, returns a report;
//! * [`driver`]: requests to the kernel module, as a trait; [`device`] is the real module;
//! * [`doctor`], [`switch`], [`status`], [`log`], [`bench`], [`facts`]: the commands of the mode
//!   switch;
//! * [`checkpoint`], [`restore`], [`inspect`], [`merge`]: the whole machine into a file, and back;
//!   [`images`] reads such files;
//! * [`refusals`]: the reasons against a checkpoint, a snapshot or a move of this machine;
//! * [`snapshot`]: a rollback of the whole machine, in memory;
//! * [`explain`], [`bits`], [`svm`], [`vmx`]: codes, bits and exits in words;
//! * [`error`], [`exit`], [`output`], [`progress`], [`interrupt`]: output for people and scripts.
//!
//! Unsafe code is in [`device`] (the kernel's interface), [`interrupt`] (signal handlers), [`tsc`],
//! the benchmarks, and the few system calls of checkpoint and restore that no library has; nowhere
//! else.

#![allow(missing_docs)]

pub mod access;
pub mod args;
pub mod bench;
pub mod bits;
pub mod checkpoint;
pub mod commands;
pub mod cpus;
pub mod daemon;
pub mod device;
pub mod doctor;
pub mod driver;
pub mod error;
pub mod ethernet;
pub mod exit;
pub mod explain;
pub mod explanation;
pub mod facts;
#[cfg(test)]
mod fake;
pub mod generate;
pub mod help;
pub mod history;
pub mod hosted;
pub mod images;
pub mod inspect;
pub mod interrupt;
pub mod journal;
pub mod lockdown;
pub mod log;
pub mod maintenance;
pub mod merge;
pub mod metrics;
pub mod migrate;
pub mod module;
pub mod output;
pub mod processor;
pub mod progress;
pub mod receive;
pub mod refusals;
pub mod restore;
pub mod rollback;
pub mod say;
pub mod size;
pub mod snapshot;
pub mod span;
pub mod stats;
pub mod status;
pub mod sudo;
pub mod svm;
pub mod switch;
pub mod sysroot;
pub mod tsc;
pub mod vmx;

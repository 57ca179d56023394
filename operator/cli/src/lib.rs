//! The library half of the `mercury` command.
//!
//! * [`args`]: the command line; [`help`]: its help, and with [`generate`] manual pages and
//!   completions;
//! * [`commands`]: each command opens the driver, does one thing, returns a report;
//! * [`doctor`], [`bench`], [`metrics`]: the commands about the mode switch;
//! * [`checkpoint`], [`restore`], [`inspect`], [`merge`]: the whole machine into a file, and back;
//!   [`images`] reads such files;
//! * [`refusals`]: the reasons against a checkpoint, a snapshot or a move of this machine;
//! * [`snapshot`]: a rollback of the whole machine, in memory.
//!
//! The crate `mercury-control` has the driver's interface, errors and output, which all of them use. Unsafe code is in the
//! benchmarks and in the few system calls of checkpoint and restore that no library has; nowhere else.

#![allow(missing_docs)]

pub mod args;
pub mod bench;
pub mod checkpoint;
pub mod commands;
pub mod daemon;
pub mod doctor;
pub mod explain;
pub mod generate;
pub mod help;
pub mod hosted;
pub mod images;
pub mod inspect;
pub mod maintenance;
pub mod merge;
pub mod metrics;
pub mod migrate;
pub mod receive;
pub mod refusals;
#[cfg(test)]
mod remedies;
pub mod restore;
pub mod snapshot;

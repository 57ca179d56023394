//! The library half of the `mercury` command.
//!
//! * [`args`]: the command line; [`help`]: its help, and with [`generate`] manual pages and
//!   completions;
//! * [`commands`]: each command opens the driver, does one thing, returns a report;
//! * [`doctor`], [`bench`], [`metrics`]: the commands about the mode switch;
//! * [`inspect`], [`maintenance`], [`daemon`], [`hosted`], [`explain`]: commands with work of their own.
//!
//! This crate is the face only. The crate `mercury-relocation` does the work of checkpoint, restore, snapshot and
//! migrate; `options` gives it the command line's arguments. The crate `mercury-control` has the driver's interface, errors
//! and output. Unsafe code is in the benchmarks and in one call of the daemon.

#![allow(missing_docs)]

pub mod args;
pub mod bench;
pub mod commands;
pub mod daemon;
pub mod doctor;
pub mod explain;
pub mod generate;
pub mod help;
pub mod hosted;
pub mod inspect;
pub mod maintenance;
pub mod metrics;
mod options;
#[cfg(test)]
mod remedies;

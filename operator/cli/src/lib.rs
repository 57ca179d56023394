//! The library half of the `mercury` command.
//!
//! * [`args`]: the list of all commands; [`shared`]: options that several commands have;
//! * [`help`], [`manual`], [`generate`]: the help, manual pages and completions, with the examples and files
//!   of [`pages`];
//! * [`commands`]: calls the command, and reports its result;
//! * [`switch`], [`status`], [`log`], [`facts`], [`fault`], [`doctor`], [`bench`], [`metrics`]: the commands
//!   about the mode switch;
//! * [`guard`]: hangs become panics, or the machine goes back;
//! * [`inspect`], [`maintenance`], [`daemon`], [`guests`], [`hosted`], [`explain`]: commands with work of
//!   their own;
//! * [`relocate`]: the options of the commands whose work is in the crate `mercury-relocation`:
//!   checkpoint, restore, snapshot, migrate.
//!
//! Each command's options are in the file of the command. This crate is the face only. The crate
//! `mercury-control` has the driver's interface, errors and output. Unsafe code is in the benchmarks
//! and in one call of the daemon.

#![allow(missing_docs)]

pub mod args;
pub mod bench;
pub mod commands;
pub mod daemon;
pub mod doctor;
pub mod explain;
pub mod facts;
pub mod fault;
pub mod generate;
pub mod guard;
pub mod guests;
pub mod help;
pub mod hosted;
pub mod identity;
pub mod inspect;
pub mod log;
pub mod maintenance;
pub mod manual;
pub mod metrics;
pub mod pages;
pub mod postmortem;
pub mod relocate;
#[cfg(test)]
mod remedies;
pub mod shared;
pub mod status;
pub mod switch;
#[cfg(test)]
mod tests;

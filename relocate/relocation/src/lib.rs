//! The work of checkpoint, restore, snapshot and migrate: a machine as a file, in memory, and on a wire.
//!
//! * [`checkpoint`]: the whole machine into a file; [`images`] reads such files, [`merge`] joins incremental
//!   ones;
//! * [`restore`]: the machine back from its file, by a restore environment;
//! * [`snapshot`]: a rollback of the whole machine, in memory;
//! * [`migrate`] and [`receive`]: the source and the destination of a move;
//! * [`refusals`]: the reasons against a checkpoint, a snapshot or a move of this machine;
//! * [`tombstone`]: the record that keeps a machine from running twice; [`operator`]: the person at the
//!   console;
//! * [`options`], [`values`], [`host`]: what the operator asks for. The command line is not known here.
//!
//! Unsafe code is in the few system calls that no library has.

#![allow(missing_docs)]

pub mod checkpoint;
pub mod host;
pub mod identity;
pub mod images;
pub mod merge;
pub mod migrate;
pub mod operator;
pub mod options;
pub mod plain;
pub mod random;
pub mod receive;
pub mod refusals;
pub mod restore;
pub mod snapshot;
pub mod tombstone;
pub mod values;

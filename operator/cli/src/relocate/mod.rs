//! The options of the commands whose work is in the crate `mercury-relocation`, and their
//! conversion to the options of that work.

pub mod checkpoint;
pub mod merge;
pub mod migrate;
pub mod receive;
pub mod restore;
pub mod snapshot;
pub mod tombstone;

//! The parsers of outside bytes in this crate, as functions of bytes for `lab/fuzz`.
//!
//! Each function must return for every input. A panic is a finding, and so is a hang.

pub use crate::gdb::fuzz::{SEEDS as GDB_SEEDS, run as gdb};

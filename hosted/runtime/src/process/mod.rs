//! Processes of the machine.

pub mod per_space;

//! An NVMe controller (NVM Express 1.4), as a driver finds it that knew another one at the same place.
//!
//! Processors reach [`Registers`], which never wait. One thread of the monitor owns the [`Controller`]: it
//! reads commands from queues in the guest's memory, executes them one after the other, and raises
//! interrupts. A driver switches the controller off and on by a register, and waits for the answer; so no
//! lock is held while a disk works.
//!
//! The controller does what Linux's driver needs: it identifies itself and its namespaces as the machine's
//! own controller did, and has the commands Read, Write, Flush, Write Zeroes and Dataset Management. It has
//! no memory of its own for queues, no shadow doorbells, no metadata, and no scatter-gather lists.

mod admin;
mod command;
mod controller;
mod identify;
mod io;
mod prp;
mod queue;
mod registers;

pub use controller::{Controller, Limits};
pub use identify::{Identity, Namespace, STRUCTURE};
pub use registers::Registers;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

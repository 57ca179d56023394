//! An AHCI controller (Serial ATA AHCI 1.3.1) with SATA disks, as a driver finds it that knew another one at
//! the same place.
//!
//! Processors reach [`Registers`], which never wait. One thread of the monitor owns the [`Controller`]: it
//! reads commands from the ports' lists in the guest's memory, executes them one after the other, and writes
//! their ends. A port says that it runs until the command that was begun has ended, so that a driver that
//! stops the port knows when its work is over. A reset waits for that as well. A disk may hang for longer
//! than a driver waits: a stop or a reset takes the guest's memory away from commands that were begun.
//!
//! The disks do what Linux's driver needs: they identify themselves as the machine's own disks did, less
//! what they cannot do, and have the commands for reading, writing (queued ones too), flushing, trimming,
//! logs and power. There are no port multipliers, no ATAPI devices and no SMART.

mod command;
mod controller;
mod drive;
mod identify;
mod registers;

pub use controller::Controller;
pub use drive::Drive;
pub use identify::Identity;
pub use registers::{FIRST_PORT, PORT, PORTS_MAX, Properties, Registers};
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

//! A network between machines of one user, without the host's network: a *subnet*.
//!
//! Each ordered pair of machines has a ring of frames in shared memory. The sender copies a frame out of its
//! guest's memory into the ring, and the receiver copies it into its own guest's memory. No machine maps
//! another one's memory, nor a ring between two others.
//!
//! - [`ring`]: the memory of a ring, its writer and its reader. Each checks whatever the other one has
//!   written.
//! - [`port`]: a machine's rings together: a switch that learns where addresses are.
//! - [`offload`]: checksums and segments that a sender has left to others.
//! - [`keeper`]: the process of a subnet. It makes the rings, hands them to machines that join, and sees them
//!   leave. It takes no part in the traffic.
//! - [`place`]: the files by which the machines of a user find a subnet.
//! - [`member`]: joining a subnet, and listing who is there.

// Names of fields need no sentence.
#![allow(missing_docs)]

pub mod error;
#[doc(hidden)]
pub mod fuzz;
pub mod keeper;
pub mod member;
mod memory;
mod message;
pub mod offload;
pub mod place;
pub mod port;
pub mod ring;
mod table;

/// The number of machines that a subnet has at most.
pub const MOST: usize = 64;

/// An Ethernet address.
pub type Address = [u8; 6];

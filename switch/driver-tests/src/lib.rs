//! The driver's arithmetic, called from Rust for tests on the host.
//!
//! The files `frames.c`, `landing.c` and `places.c` of `switch/driver/snapshot/`, and `judge.c` of
//! `switch/driver/watch/`, know nothing of the kernel. This crate compiles them for the host and compares
//! them with models: for random input, and for all input up to a small size. `ioctls.rs` reads the driver's
//! table of ioctls, and `banks.rs` its list of registers. Nothing uses the crate but its tests.

#[cfg(test)]
mod banks;
#[cfg(test)]
mod frames;
#[cfg(test)]
mod ioctls;
#[cfg(test)]
mod judge;
#[cfg(test)]
mod landing;
#[cfg(test)]
mod places;

/// The size of a page in bytes.
#[cfg(test)]
const PAGE: u64 = 4096;

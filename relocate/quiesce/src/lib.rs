//! Holding a machine still, so that its memory and its disks agree at one instant.
//!
//! * [`applications`], [`arrays`], [`disks`], [`swap`], [`watchdogs`]: programs and devices that are held,
//!   and go on afterwards; [`volumes`]: those that only come to rest, or not even that; [`control_groups`]:
//!   the room for swapped-out pages;
//! * [`mounts`], [`block_devices`]: what is mounted, and reads of the devices below;
//! * [`file_systems`]: the table of types, with what changes in each of them;
//! * [`fence`], [`stale`], [`ethernet`], [`nfs`]: the network, on which no peer may hear two machines;
//! * [`devices`], [`openers`], [`rdma`], [`macsec`], [`plugged`], [`waits`], [`reachable`]: devices and
//!   memory that cannot be held or brought back, with the names of their users;
//! * [`freezer`]: the patience of the kernel's own freezer;
//! * [`undo`], [`guard`]: the process that undoes everything if the command is killed: its steps, and its
//!   work;
//! * [`describe`], [`hardware`], [`guest`]: the machine's description, and what it needs as a guest;
//! * [`returned`]: the note of a return, in the image;
//! * [`pool`], [`phases`], [`patient`]: memory for the instant, times, and reads that do not wait for ever;
//! * [`attached`], [`hook`], [`culprit`], [`this_process`]: the hypervisor for one command, the operator's
//!   hook, the device or the tasks that did not stop, and the command's own process.

#![allow(missing_docs)]

mod ahci;
pub mod applications;
pub mod arrays;
pub mod attached;
pub mod block_devices;
mod boot_map;
mod claims;
mod control_groups;
mod cpuid;
pub mod culprit;
pub mod describe;
pub mod devices;
pub mod disks;
pub mod ethernet;
pub mod fence;
pub mod file_systems;
mod firmware;
pub mod freezer;
pub mod guard;
pub mod guest;
pub mod hardware;
pub mod hook;
mod layers;
pub mod macsec;
pub mod metal;
pub mod mounts;
mod netlink;
pub mod nfs;
pub mod nvme;
pub mod openers;
pub mod patient;
pub mod phases;
pub mod plugged;
pub mod pool;
pub mod rdma;
pub mod reachable;
pub mod returned;
pub mod stale;
pub mod stillness;
pub mod swap;
pub mod this_process;
pub mod undo;
pub mod volumes;
pub mod waits;
pub mod watchdogs;
pub mod writers;
mod xsave;

//! The targets, one file each.

pub mod announcement;
pub mod command_line;
pub mod controllers;
pub mod gdb;
pub mod guest;
pub mod image;
pub mod orders;
pub mod records;
pub mod subnet;
pub mod virtio;
pub mod wire;

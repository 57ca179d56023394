//! Page tables: one [`table::PageTable`] for every [`format::Format`], and the identity map that
//! stands between an attached system and its memory.

pub mod format;
pub mod identity;
pub mod plan;
pub mod sink;
pub mod table;

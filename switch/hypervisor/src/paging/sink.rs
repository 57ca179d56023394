//! Memory of which hidden pages were written, so that the oldest can be armed again.

use crate::address::{GuestPhys, HostPhys};

/// Pages that are remembered; the oldest gives way.
pub const MAX_SUNK: usize = 64;

/// A hidden page whose writes go to a sink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sunk {
    /// The page as the system sees it.
    pub page: GuestPhys,
    /// Page that takes the writes, host-physical.
    pub sink: HostPhys,
}

/// The pages that are sunk now, oldest first from `next`.
#[derive(Clone, Copy, Debug)]
pub struct SunkPages {
    ring: [Option<Sunk>; MAX_SUNK],
    next: usize,
}

impl SunkPages {
    /// Returns a memory without any sunk page.
    #[must_use]
    pub const fn new() -> Self {
        Self { ring: [None; MAX_SUNK], next: 0 }
    }

    /// Remembers a page. Returns the one that had to give way.
    pub fn push(&mut self, sunk: Sunk) -> Option<Sunk> {
        let evicted = self.ring[self.next % MAX_SUNK].replace(sunk);
        self.next = (self.next + 1) % MAX_SUNK;
        evicted
    }
}

impl Default for SunkPages {
    fn default() -> Self {
        Self::new()
    }
}

//! What a move has come to, and what is said while it goes on.

use super::copy::Pass;
use crate::output::{Render, Text, bytes, duration, thousands};
use serde::Serialize;

/// A move, as far as this end knows it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// Its name.
    pub attempt: String,
    /// This is the machine that has arrived.
    pub arrived: bool,
    /// Bytes of memory.
    pub memory: u64,
    /// Rounds while everything ran.
    pub rounds: u64,
    /// Pages that were sent in them, and after the instant.
    pub pages: [u64; 2],
    /// Bytes on the wire, likewise.
    pub bytes: [u64; 2],
    /// What told which pages had changed: a log of writes, or hashes of all memory and why.
    pub found_by: String,
    /// Pages that were read after the instant.
    pub looked: u64,
    /// With `--verify-log`: pages that had changed and were not in the log. They were sent all the same.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub missed: Option<u64>,
    /// Microseconds until everything stood still, with the instant.
    pub quiesce_us: f64,
    /// Microseconds from the instant until the last page was sent.
    pub last_us: f64,
    /// Microseconds for which applications stood still: until what has arrived was heard of.
    pub downtime_us: f64,
    /// Seconds in all.
    pub seconds: f64,
}

impl Render for Report {
    fn render(&self, to: &mut Text) {
        if self.arrived {
            to.line(format!("this machine has moved here (attempt {})", self.attempt));
            return;
        }
        to.line(format!("the machine has moved (attempt {})", self.attempt));
        to.line(format!(
            "{} of memory: {} pages in {} rounds ({}), {} after the instant ({})",
            bytes(self.memory),
            thousands(self.pages[0]),
            self.rounds,
            bytes(self.bytes[0]),
            thousands(self.pages[1]),
            bytes(self.bytes[1])
        ));
        to.line(format!("what had changed was found by {}", self.found_by));
        if let Some(missed) = self.missed {
            to.line(format!("{} pages were missing in the log", thousands(missed)));
        }
        to.line(format!(
            "applications stood still for {}: {} until the instant, {} for the last pages; {:.1} s in all",
            duration(self.downtime_us),
            duration(self.quiesce_us),
            duration(self.last_us),
            self.seconds
        ));
    }
}

/// A round that is over.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Told {
    /// A round that is over, while everything runs.
    Round {
        /// Its number, from 0.
        round: u64,
        /// Pages that were sent.
        pages: u64,
        /// Of these, all zeros.
        zero_pages: u64,
        /// Bytes on the wire.
        bytes: u64,
        /// How long it took.
        seconds: f64,
        /// Pages that were not any more what had been sent, in a second of the round before.
        dirty_pages_per_second: f64,
        /// The downtime if the machine were stopped now.
        downtime_ms: f64,
    },
}

impl Render for Told {
    fn render(&self, to: &mut Text) {
        let Self::Round { round, pages, bytes: sent, seconds, dirty_pages_per_second, downtime_ms, .. } =
            self;
        to.line(format!(
            "round {round}: {} pages, {} in {seconds:.1} s; {dirty_pages_per_second:.0} pages/s are written; downtime \
             now about {downtime_ms:.0} ms",
            thousands(*pages),
            bytes(*sent)
        ));
    }
}

/// How far a pass is.
#[must_use]
pub fn how_far(name: &str, pass: &Pass, total: u64, seconds: f64) -> String {
    const PAGE: u64 = 4096;
    format!(
        "{name}: {} of {} ({} %), {}/s on the wire",
        bytes(pass.looked * PAGE),
        bytes(total * PAGE),
        pass.looked * 100 / total.max(1),
        bytes((pass.bytes as f64 / seconds.max(0.001)) as u64)
    )
}

//! The report of a checkpoint, and the line of progress before it.

use super::PAGE;
use mercury_control::output::{Render, Text, bytes, duration, thousands};
use mercury_quiesce::phases::Phases;
use serde::Serialize;
use std::time;

/// The result of a checkpoint.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Identity of the image.
    pub identity: String,
    /// Identity of its parent, without which the image is useless.
    pub parent: Option<String>,
    /// True on the machine that was restored from the image.
    pub restored: bool,
    /// Bytes of memory in the image.
    pub memory: u64,
    /// Bytes of the image.
    pub image: u64,
    /// Pages that are all zeros.
    pub zero_pages: u64,
    /// Pages that equal another one.
    pub duplicate_pages: u64,
    /// Pages that equal the parent's.
    pub unchanged_pages: u64,
    /// Pages that were copied because they were written to.
    pub copied_pages: u64,
    /// Pages that were added to the pool because it ran low.
    pub added_pages: u64,
    /// Pages of the pool that the system got back because it had no memory left.
    pub returned_pages: u64,
    /// Number of times that streaming was told to hurry because the pool ran low.
    pub hurries: u64,
    /// Number of times that a writer had to wait because the pool was nearly empty.
    pub waits: u64,
    /// Microseconds for which applications stood still.
    pub pause_us: f64,
    /// Parts of that time.
    pub phases: Phases,
    /// Seconds of streaming, after that.
    pub stream_seconds: f64,
    /// Seconds of the whole checkpoint.
    pub seconds: f64,
    /// Warning about a restore, for the operator; in the restored machine, what it did not get back.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
}

impl Render for Report {
    fn render(&self, to: &mut Text) {
        if self.restored {
            to.line(format!("this machine was restored from image {}", self.identity));
            if let Some(warning) = &self.warning {
                to.wrapped("note: ", warning);
            }
            return;
        }
        let parent = self.parent.as_ref().map(|parent| format!(", made on image {parent}"));
        to.line(format!("image {} is complete{}", self.identity, parent.unwrap_or_default()));
        let unchanged = match self.parent {
            Some(_) => format!("{} pages as in the parent, ", thousands(self.unchanged_pages)),
            None => String::new(),
        };
        to.line(format!(
            "{} of memory in {}: {unchanged}{} pages of zeros, {} duplicates, \
             {} copied because they were written to",
            bytes(self.memory),
            bytes(self.image),
            thousands(self.zero_pages),
            thousands(self.duplicate_pages),
            thousands(self.copied_pages)
        ));
        if self.added_pages > 0 {
            to.line(format!("the pool ran low, and got {} pages more", thousands(self.added_pages)));
        }
        if self.returned_pages > 0 {
            let pages = thousands(self.returned_pages);
            to.line(format!("the system got {pages} pages of the pool back, because it had no memory left"));
        }
        if self.waits > 0 {
            to.line(format!("writers waited {} times for free pool pages", thousands(self.waits)));
        }
        let rate = bytes((self.memory as f64 / self.seconds.max(0.001)) as u64);
        to.line(format!(
            "applications stood still for {}; {:.1} s in all, {rate}/s of memory",
            duration(self.pause_us),
            self.seconds
        ));
        self.phases.render(to);
        if let Some(warning) = &self.warning {
            to.wrapped("note: ", warning);
        }
    }
}

pub(super) fn how_far(frames: u64, total: u64, image: u64, elapsed: time::Duration) -> String {
    let rate = (frames * PAGE) as f64 / elapsed.as_secs_f64();
    let left = (total.saturating_sub(frames) * PAGE) as f64 / rate.max(1.0);
    format!(
        "{} of {} ({} %), {}/s, image {}, {left:.0} s left",
        bytes(frames * PAGE),
        bytes(total * PAGE),
        frames * 100 / total.max(1),
        bytes(rate as u64),
        bytes(image)
    )
}

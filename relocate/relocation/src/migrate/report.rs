//! The result of a move, and the events during it.

use super::{copy::Pass, course::Outlook};
use mercury_control::output::{Render, Text, bytes, duration, thousands};
use serde::Serialize;

/// The result of a move, as far as this end knows it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    pub attempt: String,
    /// True on the machine that has arrived.
    pub arrived: bool,
    /// Bytes of memory.
    pub memory: u64,
    /// Rounds while everything ran.
    pub rounds: u64,
    /// Pages that were sent in each round; the last number is for the time after the instant, if it
    /// is known here.
    pub pages: Vec<u64>,
    /// Bytes on the wire, in the same order.
    pub bytes: Vec<u64>,
    /// Bytes of the disks that moved.
    #[serde(skip_serializing_if = "is_zero")]
    pub disks: u64,
    /// Bytes on the wire for the disks, as far as they are known here.
    #[serde(skip_serializing_if = "is_zero")]
    pub disk_bytes: u64,
    /// The part after the instant, which the machine that has arrived does not know.
    #[serde(flatten)]
    pub after: Option<After>,
    /// Pages that had changed and were not in the dirty log, with `--verify-log`. They were sent
    /// anyway.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub missed: Option<u64>,
}

/// Returns true if a number is left out of the JSON.
#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// The numbers that only the source knows.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct After {
    /// Source of the changed pages: a dirty log, or hashes of all memory and the reason.
    pub found_by: String,
    /// Pages that were read after the instant.
    pub scanned: u64,
    /// Microseconds until everything stood still, with the instant.
    pub quiesce_us: f64,
    /// Microseconds from the instant until the last page was sent.
    pub last_us: f64,
    /// Microseconds from there until the destination had verified the pages, and the source's
    /// tombstone was written.
    pub verify_us: f64,
    /// Microseconds from the commit until the machine that has arrived announced itself.
    pub start_us: f64,
    /// Microseconds for which applications stood still, until the machine that has arrived
    /// announced itself.
    pub downtime_us: f64,
    /// Seconds of the whole move.
    pub seconds: f64,
}

impl Report {
    /// Makes the report of a move that begins, at the source.
    #[must_use]
    pub fn new(attempt: String, memory: u64) -> Self {
        let sums = vec![0; 2];
        Self {
            attempt,
            memory,
            pages: sums.clone(),
            bytes: sums,
            after: Some(After::default()),
            ..Self::default()
        }
    }

    /// Turns the report into that of the machine that has arrived, which knows only what was known
    /// at the instant.
    pub fn arrive(&mut self) {
        self.arrived = true;
        self.pages.truncate(1);
        self.bytes.truncate(1);
        self.after = None;
    }
}

impl Render for Report {
    fn render(&self, to: &mut Text) {
        let (Some(after), [pages, last_pages], [sent, last_sent]) =
            (&self.after, &self.pages[..], &self.bytes[..])
        else {
            to.line(format!("this machine has moved here (attempt {})", self.attempt));
            return;
        };
        to.line(format!("the machine has moved (attempt {})", self.attempt));
        to.line(format!(
            "{} of memory: {} pages in {} rounds ({}), {} after the instant ({})",
            bytes(self.memory),
            thousands(*pages),
            self.rounds,
            bytes(*sent),
            thousands(*last_pages),
            bytes(*last_sent)
        ));
        if self.disks > 0 {
            to.line(format!("{} of disks moved too ({})", bytes(self.disks), bytes(self.disk_bytes)));
        }
        to.line(format!("changed pages were found by {}", after.found_by));
        if let Some(missed) = self.missed {
            to.line(format!("{} pages were missing in the dirty log", thousands(missed)));
        }
        to.line(format!(
            "applications stood still for {}: {} until the instant, {} for the last pages, \
             {} until they were verified, {} for the start; {:.1} s in all",
            duration(after.downtime_us),
            duration(after.quiesce_us),
            duration(after.last_us),
            duration(after.verify_us),
            duration(after.start_us),
            after.seconds
        ));
    }
}

/// An event of the move, told while applications run.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum MoveEvent {
    /// The destination accepts this machine: it is equal, and has room.
    Accepted {
        /// Bytes of memory to send.
        memory: u64,
    },
    /// A round is over, while everything runs.
    Round {
        /// Number of the round, from 0.
        round: u64,
        pages: u64,
        /// Pages of zeros among them.
        zero_pages: u64,
        /// Bytes on the wire.
        bytes: u64,
        /// Duration in seconds.
        seconds: f64,
        /// Bytes on the wire per second.
        bytes_per_second: f64,
        /// Pages that changed after they had been sent, per second of the round before.
        dirty_pages_per_second: f64,
        /// Expected downtime if the machine were stopped now.
        downtime_ms: f64,
        /// Throttle of the load in the next round, in percent of its time.
        throttle_percent: u8,
    },
    /// A round over the disks is over, while everything runs. These rounds come before memory.
    Mirrored {
        /// Number of the round, from 0.
        round: u64,
        /// Bytes that were read: the whole disks, and later the chunks that were written to.
        read: u64,
        /// Bytes among these that had changed since they were sent.
        changed: u64,
        /// Bytes on the wire.
        bytes: u64,
        /// Duration in seconds.
        seconds: f64,
    },
    /// Applications are about to stand still.
    Stops,
    /// The destination was told to start, and its answer is missing. Told only if standard output
    /// can be written to, because applications stand still.
    Doubt {
        /// The text for the operator at the console.
        advice: String,
    },
    /// The machine has not moved, and goes on.
    Resumed { why: String },
}

impl MoveEvent {
    /// Makes the event for a round with these numbers.
    #[must_use]
    pub fn round(round: u64, done: &Pass, outlook: &Outlook) -> Self {
        let seconds = done.took.as_secs_f64();
        Self::Round {
            round,
            pages: done.sent,
            zero_pages: done.zeros,
            bytes: done.bytes,
            seconds,
            bytes_per_second: done.bytes as f64 / seconds.max(0.001),
            dirty_pages_per_second: outlook.dirty_pages_per_second,
            downtime_ms: outlook.downtime.as_secs_f64() * 1e3,
            throttle_percent: outlook.throttle_percent(),
        }
    }
}

impl Render for MoveEvent {
    fn render(&self, to: &mut Text) {
        let Self::Round {
            round,
            pages,
            bytes: sent,
            seconds,
            bytes_per_second,
            dirty_pages_per_second,
            downtime_ms,
            throttle_percent,
            ..
        } = self
        else {
            return to.line(match self {
                Self::Mirrored { round, read, changed, bytes: sent, seconds } => format!(
                    "round {round}: {} of disks were read, {} had changed, {} in {seconds:.1} s",
                    bytes(*read),
                    bytes(*changed),
                    bytes(*sent)
                ),
                Self::Accepted { memory } => {
                    format!("the destination accepts this machine: {} of memory", bytes(*memory))
                }
                Self::Doubt { advice } => advice.clone(),
                Self::Resumed { .. } => "the machine has not moved, and goes on".to_owned(),
                _ => "applications stand still now".to_owned(),
            });
        };
        let held_back = match throttle_percent {
            0 => String::new(),
            percent => format!("; applications are throttled by {percent} % of the time now"),
        };
        to.line(format!(
            "round {round}: {} pages, {} in {seconds:.1} s ({}/s); {dirty_pages_per_second:.0} pages/s \
             are written to; downtime now about {downtime_ms:.0} ms{held_back}",
            thousands(*pages),
            bytes(*sent),
            bytes(*bytes_per_second as u64)
        ));
    }
}

/// Formats the progress of a pass.
#[must_use]
pub fn how_far(name: &str, pass: &Pass, total: u64, seconds: f64) -> String {
    const PAGE: u64 = 4096;
    format!(
        "{name}: {} of {} ({} %), {}/s on the wire",
        bytes(pass.scanned * PAGE),
        bytes(total * PAGE),
        pass.scanned * 100 / total.max(1),
        bytes((pass.bytes as f64 / seconds.max(0.001)) as u64)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use mercury_migration::rounds::Next;
    use serde_json::{Value, json};
    use std::time::Duration;

    /// Each kind of event, exactly as scripts read it and docs/command.md describes it.
    #[test]
    fn events_are_as_they_are_written_down() {
        let done =
            Pass { sent: 2, zeros: 1, bytes: 300, took: Duration::from_millis(500), ..Pass::default() };
        let outlook = Outlook {
            dirty_pages_per_second: 4.5,
            downtime: Duration::from_millis(600),
            next: Next::Copy { throttle_percent: 15 },
        };
        let round = json!({
            "event": "round", "round": 1, "pages": 2, "zero_pages": 1, "bytes": 300, "seconds": 0.5,
            "bytes_per_second": 600.0,
            "dirty_pages_per_second": 4.5, "downtime_ms": 600.0, "throttle_percent": 15
        });
        let mirrored = json!({
            "event": "mirrored", "round": 1, "read": 8, "changed": 4, "bytes": 2, "seconds": 0.5
        });
        let all = [
            (MoveEvent::Accepted { memory: 4096 }, json!({"event": "accepted", "memory": 4096})),
            (MoveEvent::round(1, &done, &outlook), round),
            (MoveEvent::Mirrored { round: 1, read: 8, changed: 4, bytes: 2, seconds: 0.5 }, mirrored),
            (MoveEvent::Stops, json!({"event": "stops"})),
            (MoveEvent::Doubt { advice: "look".into() }, json!({"event": "doubt", "advice": "look"})),
            (MoveEvent::Resumed { why: "no".into() }, json!({"event": "resumed", "why": "no"})),
        ];
        let table = include_str!("../../../../docs/command.md");
        let row = table.lines().find(|line| line.starts_with("| `migrate` |")).expect("a row");
        for (told, expected) in all {
            // A new kind fails to compile here until it is added above.
            match &told {
                MoveEvent::Accepted { .. }
                | MoveEvent::Round { .. }
                | MoveEvent::Mirrored { .. }
                | MoveEvent::Stops
                | MoveEvent::Doubt { .. }
                | MoveEvent::Resumed { .. } => {}
            }
            let said = serde_json::to_value(&told).expect("JSON");
            assert_eq!(said, expected);
            let Value::Object(fields) = said else { panic!("no object") };
            for name in fields.keys().map(String::as_str).chain(fields["event"].as_str()) {
                assert!(row.contains(&format!("`{name}`")), "{name} is not in docs/command.md");
            }
        }
    }

    /// Unknown numbers are left out.
    #[test]
    fn unknown_numbers_are_left_out() {
        let mut report = Report::new("one".into(), 4096);
        let said = |report: &Report| serde_json::to_value(report).expect("JSON");
        assert_eq!(said(&report)["downtime_us"], 0.0);
        report.arrive();
        let arrived = said(&report);
        for name in [
            "found_by",
            "scanned",
            "quiesce_us",
            "last_us",
            "verify_us",
            "start_us",
            "downtime_us",
            "seconds",
        ] {
            assert!(arrived.get(name).is_none(), "{name}: {arrived}");
        }
        assert_eq!(arrived["pages"], serde_json::json!([0]));
    }
}

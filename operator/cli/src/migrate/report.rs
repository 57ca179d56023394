//! What a move has come to, and what is said while it goes on.

use super::{copy::Pass, course::Outlook};
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
    /// Pages that were sent in them, and after the instant as far as that is known here.
    pub pages: Vec<u64>,
    /// Bytes on the wire, likewise.
    pub bytes: Vec<u64>,
    /// Bytes of the disks that went along.
    #[serde(skip_serializing_if = "is_zero")]
    pub disks: u64,
    /// What went over the wire for them, as far as that is known here.
    #[serde(skip_serializing_if = "is_zero")]
    pub disk_bytes: u64,
    /// What came after the instant: what has arrived knows nothing of it.
    #[serde(flatten)]
    pub after: Option<After>,
    /// With `--verify-log`: pages that had changed and were not in the log. They were sent all the same.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub missed: Option<u64>,
}

/// It is not said where there is nothing to be said.
#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde wants it so")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// What only the machine knows that the other one was.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct After {
    /// What told which pages had changed: a log of writes, or hashes of all memory and why.
    pub found_by: String,
    /// Pages that were read after the instant.
    pub looked: u64,
    /// Microseconds until everything stood still, with the instant.
    pub quiesce_us: f64,
    /// Microseconds from the instant until the last page was sent.
    pub last_us: f64,
    /// Microseconds from there until the other machine had verified it, and this one's mark was there.
    pub verify_us: f64,
    /// Microseconds from the commit until what has arrived was heard of.
    pub start_us: f64,
    /// Microseconds for which applications stood still: until what has arrived was heard of.
    pub downtime_us: f64,
    /// Seconds in all.
    pub seconds: f64,
}

impl Report {
    /// At the beginning, where it moves from.
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

    /// This is what has arrived: it knows what was at the instant.
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
            to.line(format!("{} of disks went along ({})", bytes(self.disks), bytes(self.disk_bytes)));
        }
        to.line(format!("what had changed was found by {}", after.found_by));
        if let Some(missed) = self.missed {
            to.line(format!("{} pages were missing in the log", thousands(missed)));
        }
        to.line(format!(
            "applications stood still for {}: {} until the instant, {} for the last pages, {} until they were \
             verified, {} for the start; {:.1} s in all",
            duration(after.downtime_us),
            duration(after.quiesce_us),
            duration(after.last_us),
            duration(after.verify_us),
            duration(after.start_us),
            after.seconds
        ));
    }
}

/// How far the move is, as it is told while applications run.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Told {
    /// The other machine takes this one: it is equal to it, and has room.
    Accepted {
        /// Bytes of memory that there are to send.
        memory: u64,
    },
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
        /// Bytes on the wire in a second of it.
        bytes_per_second: f64,
        /// Pages that were not any more what had been sent, in a second of the round before.
        dirty_pages_per_second: f64,
        /// The downtime if the machine were stopped now.
        downtime_ms: f64,
        /// How far the load is held back in the next round, in percent of its time.
        throttle_percent: u8,
    },
    /// What of disks has been sent in a round, while everything runs: before memory.
    Mirrored {
        /// Its number, from 0.
        round: u64,
        /// Bytes that were read: all, and then what was written to.
        read: u64,
        /// Of these, what was not what had been sent.
        changed: u64,
        /// Bytes on the wire.
        bytes: u64,
        /// How long it took.
        seconds: f64,
    },
    /// Applications are about to stand still.
    Stops,
    /// The other machine was told to start, and it is not known whether it has. Only where somebody can read it: applications stand
    /// still.
    Doubt {
        /// What the operator is told at the console.
        advice: String,
    },
    /// The machine has not moved, and goes on.
    Resumed {
        /// Why.
        why: String,
    },
}

impl Told {
    /// A round that has come to this.
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

impl Render for Told {
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
                    format!("the other machine takes this one: {} of memory", bytes(*memory))
                }
                Self::Doubt { advice } => advice.clone(),
                Self::Resumed { .. } => "the machine has not moved, and goes on".to_owned(),
                _ => "applications stand still now".to_owned(),
            });
        };
        let held_back = match throttle_percent {
            0 => String::new(),
            percent => format!("; applications stand still for {percent} % of the time now"),
        };
        to.line(format!(
            "round {round}: {} pages, {} in {seconds:.1} s ({}/s); {dirty_pages_per_second:.0} pages/s are written; downtime \
             now about {downtime_ms:.0} ms{held_back}",
            thousands(*pages),
            bytes(*sent),
            bytes(*bytes_per_second as u64)
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

#[cfg(test)]
mod tests {
    use super::*;
    use mercury_migration::rounds::Next;
    use serde_json::{Value, json};
    use std::time::Duration;

    /// What scripts read: each kind, to the letter, and in docs/command.md.
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
            "event": "round", "round": 1, "pages": 2, "zero_pages": 1, "bytes": 300, "seconds": 0.5, "bytes_per_second": 600.0,
            "dirty_pages_per_second": 4.5, "downtime_ms": 600.0, "throttle_percent": 15
        });
        let mirrored = json!({
            "event": "mirrored", "round": 1, "read": 8, "changed": 4, "bytes": 2, "seconds": 0.5
        });
        let all = [
            (Told::Accepted { memory: 4096 }, json!({"event": "accepted", "memory": 4096})),
            (Told::round(1, &done, &outlook), round),
            (Told::Mirrored { round: 1, read: 8, changed: 4, bytes: 2, seconds: 0.5 }, mirrored),
            (Told::Stops, json!({"event": "stops"})),
            (Told::Doubt { advice: "look".into() }, json!({"event": "doubt", "advice": "look"})),
            (Told::Resumed { why: "no".into() }, json!({"event": "resumed", "why": "no"})),
        ];
        let table = include_str!("../../../../docs/command.md");
        let row = table.lines().find(|line| line.starts_with("| `migrate` |")).expect("a row");
        for (told, expected) in all {
            // Whoever adds a kind adds it above.
            match &told {
                Told::Accepted { .. }
                | Told::Round { .. }
                | Told::Mirrored { .. }
                | Told::Stops
                | Told::Doubt { .. }
                | Told::Resumed { .. } => {}
            }
            let said = serde_json::to_value(&told).expect("JSON");
            assert_eq!(said, expected);
            let Value::Object(fields) = said else { panic!("no object") };
            for name in fields.keys().map(String::as_str).chain(fields["event"].as_str()) {
                assert!(row.contains(&format!("`{name}`")), "{name} is not in docs/command.md");
            }
        }
    }

    /// What has arrived does not say nothing in numbers.
    #[test]
    fn what_is_not_known_is_left_out() {
        let mut report = Report::new("one".into(), 4096);
        let said = |report: &Report| serde_json::to_value(report).expect("JSON");
        assert_eq!(said(&report)["downtime_us"], 0.0);
        report.arrive();
        let arrived = said(&report);
        for name in
            ["found_by", "looked", "quiesce_us", "last_us", "verify_us", "start_us", "downtime_us", "seconds"]
        {
            assert!(arrived.get(name).is_none(), "{name}: {arrived}");
        }
        assert_eq!(arrived["pages"], serde_json::json!([0]));
    }
}

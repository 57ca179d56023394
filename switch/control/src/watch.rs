//! The watch for CPUs that hang, as the driver reports it.

use crate::output::{Render, Text, Tone, thousands};
use mercury_abi::{
    code::Code,
    ioctl::{
        MERCURY_WATCH_OOPS, MERCURY_WATCH_OOPS_FATAL, MERCURY_WATCH_PANIC, MERCURY_WATCH_TIER_HPET,
        MERCURY_WATCH_TIER_PERF, WatchRequest,
    },
};
use serde::Serialize;

/// The state of the watch.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Watch {
    /// State: `on` or `off`.
    pub state: &'static str,
    /// Number of CPUs that are watched.
    pub cpus: u32,
    /// The independent source of NMIs: the HPET.
    pub hpet: Source,
    /// The native source of NMIs: each CPU's counter of cycles.
    pub cycles: Source,
    /// Consequence of a hang without a snapshot: `panic` or `report`.
    pub on_hang: &'static str,
    /// Oopses that put the machine back to its snapshot: `none`, `fatal` or `all`.
    pub on_oops: &'static str,
    /// Number of NMIs of the HPET.
    pub nmis: u64,
    /// Number of hangs that were noticed.
    pub alarms: u64,
    /// Longest time for which a CPU has been seen frozen with interrupts off, in milliseconds.
    pub longest_frozen_ms: u64,
    /// Last alarm in words.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub last_alarm: String,
}

/// A source of NMIs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Source {
    /// True if NMIs of this source are in use.
    pub used: bool,
    /// Code that tells why the source is not used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub code: Option<&'static str>,
}

impl Source {
    fn new(used: bool, code: u32) -> Self {
        let name = Code::from_number(code).filter(|code| *code != Code::Ok).map(Code::name);
        Self { used, code: name.filter(|_| !used) }
    }

    fn text(self) -> String {
        match (self.used, self.code) {
            (true, _) => "in use".to_owned(),
            (false, Some(code)) => format!("not used: {code} (`mercury explain {code}`)"),
            (false, None) => "not used".to_owned(),
        }
    }
}

impl Watch {
    /// Converts the driver's report.
    #[must_use]
    pub fn new(request: &WatchRequest) -> Self {
        let oops = (request.acts & MERCURY_WATCH_OOPS, request.acts & MERCURY_WATCH_OOPS_FATAL);
        let end = request.message.iter().position(|byte| *byte == 0).unwrap_or(request.message.len());
        Self {
            state: if request.acts == 0 { "off" } else { "on" },
            cpus: request.cpus,
            hpet: Source::new(request.tiers & MERCURY_WATCH_TIER_HPET != 0, request.hpet_code),
            cycles: Source::new(request.tiers & MERCURY_WATCH_TIER_PERF != 0, request.perf_code),
            on_hang: if request.acts & MERCURY_WATCH_PANIC == 0 { "report" } else { "panic" },
            on_oops: match oops {
                (0, 0) => "none",
                (0, _) => "fatal",
                _ => "all",
            },
            nmis: request.ticks,
            alarms: request.alarms,
            longest_frozen_ms: request.longest_ms,
            last_alarm: String::from_utf8_lossy(&request.message[..end]).into_owned(),
        }
    }
}

impl Render for Watch {
    fn render(&self, to: &mut Text) {
        if self.state == "off" {
            to.line("the watch is off: `mercury guard on` starts it");
        } else {
            match self.hpet.used || self.cycles.used {
                true => {
                    let on = to.tone(Tone::Good, "on");
                    to.line(format!("the watch is {on} for {} CPUs", self.cpus));
                }
                false => {
                    let blind = to.tone(Tone::Bad, "no source of NMIs is left");
                    to.line(format!("{blind}: no hang is noticed; `mercury guard on` tries again"));
                }
            }
            to.line(format!("NMIs of the HPET: {}", self.hpet.text()));
            to.line(format!("NMIs of counters of cycles: {}", self.cycles.text()));
            let hang = if self.on_hang == "panic" { "a panic" } else { "reported" };
            to.line(format!("a hang without a snapshot becomes: {hang}"));
            to.line(format!("an oops puts the machine back to a snapshot: {}", self.on_oops));
        }
        to.line(format!(
            "hangs noticed: {}; longest time frozen: {} ms",
            thousands(self.alarms),
            thousands(self.longest_frozen_ms)
        ));
        if !self.last_alarm.is_empty() {
            let alarm = to.tone(Tone::Bad, &self.last_alarm);
            to.line(format!("last alarm: {alarm}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::no_watch;

    #[test]
    fn a_watch_in_words() {
        let mut given = no_watch();
        assert_eq!(Watch::new(&given).state, "off");
        (given.acts, given.tiers, given.cpus) = (1 | MERCURY_WATCH_PANIC, MERCURY_WATCH_TIER_HPET, 4);
        given.perf_code = Code::WatchNoPmu as u32;
        given.message[..5].copy_from_slice(b"CPU 3");
        let watch = Watch::new(&given);
        assert_eq!((watch.on_hang, watch.on_oops, watch.last_alarm.as_str()), ("panic", "none", "CPU 3"));
        assert_eq!((watch.hpet.code, watch.cycles.code), (None, Some("watch-no-pmu")));
        let mut text = Text::new(false);
        watch.render(&mut text);
        let text = text.finish();
        assert!(text.contains("on for 4 CPUs") && text.contains("not used: watch-no-pmu"), "{text}");
    }

    #[test]
    fn oopses_by_policy() {
        for (acts, name) in
            [(1, "none"), (1 | MERCURY_WATCH_OOPS_FATAL, "fatal"), (1 | MERCURY_WATCH_OOPS, "all")]
        {
            assert_eq!(Watch::new(&WatchRequest { acts, ..no_watch() }).on_oops, name);
        }
    }
}

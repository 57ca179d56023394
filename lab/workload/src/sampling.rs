//! perf's samples of all CPUs, the kernel included. The samples come by the processor's cycles, as
//! NMIs, where there is such a counter (QEMU's software emulation has none), and by the CPU's clock
//! otherwise.

use std::{thread, time::Duration};

use serde_json::json;

use crate::{
    Result,
    attr::{Attr, HARDWARE_CYCLES, SAMPLE_CPU, SAMPLE_IP, SOFTWARE_CPU_CLOCK, flag, kind},
    cpus,
    perf::{Ring, Samples},
    report::Report,
    stop::Stop,
};

const FREQUENCY: u64 = 500;
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// The number of readings without a sample that are no violation: a CPU of a busy emulator may wait
/// a while for its turn.
const PATIENCE: u32 = 25;

/// Samples all CPUs.
pub fn run(stop: &Stop, report: &mut Report) -> Result<()> {
    let cpus = cpus::usable()?;
    let (attr, source) = best_source(cpus[0]);
    report.fact("source", source);
    let rings = cpus.iter().map(|&cpu| Ring::start(&attr, cpu)).collect::<Result<Vec<_>, _>>()?;
    let mut watched: Vec<Watched> = cpus.iter().map(|&cpu| Watched { cpu, ..Watched::default() }).collect();
    while !stop.now() {
        thread::sleep(LOOK_EVERY);
        for (ring, watched) in rings.iter().zip(&mut watched) {
            watched.add(ring.take(), report);
        }
        report.pass();
    }
    for (ring, watched) in rings.iter().zip(&watched) {
        ring.event().finish()?;
        watched.finish(report);
    }
    Ok(())
}

fn best_source(cpu: usize) -> (Attr, &'static str) {
    let attr = |kind, config| Attr {
        kind,
        config,
        sample_period: FREQUENCY,
        sample_type: SAMPLE_IP | SAMPLE_CPU,
        flags: flag::FREQUENCY,
        ..Attr::default()
    };
    let cycles = attr(kind::HARDWARE, HARDWARE_CYCLES);
    match Ring::start(&cycles, cpu) {
        Ok(_) => (cycles, "cycles"),
        Err(_) => (attr(kind::SOFTWARE, SOFTWARE_CPU_CLOCK), "cpu-clock"),
    }
}

/// The samples of one CPU.
#[derive(Debug, Default)]
struct Watched {
    cpu: usize,
    all: Samples,
    /// Readings since the last sample.
    silent: u32,
    longest_silence: u32,
}

impl Watched {
    fn add(&mut self, new: Samples, report: &mut Report) {
        self.silent = if new.taken() == 0 { self.silent + 1 } else { 0 };
        self.longest_silence = self.longest_silence.max(self.silent);
        let cpu = self.cpu;
        report.check(self.silent != PATIENCE, || format!("CPU {cpu}: no samples come any more"));
        report.check(new.astray == 0, || format!("CPU {cpu}: samples of another CPU"));
        report.check(new.elsewhere == 0, || format!("CPU {cpu}: samples of neither kernel nor user"));
        self.all.kernel += new.kernel;
        self.all.user += new.user;
        self.all.lost += new.lost;
    }

    fn finish(&self, report: &mut Report) {
        let cpu = self.cpu;
        report.check(self.all.taken() > 0, || format!("CPU {cpu}: not one sample"));
        let value = json!({
            "kernel": self.all.kernel,
            "user": self.all.user,
            "lost": self.all.lost,
            "longest_silence_ms": u64::from(self.longest_silence) * LOOK_EVERY.as_millis() as u64,
        });
        report.fact(&format!("cpu{cpu}"), value);
    }
}

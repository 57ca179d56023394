//! The page docs/benchmarks.md, and the check of the promises.

use super::{Compared, Figures, checkpoint, guard, kvm, migration, previrtualization, switch};
use mercury_lab::{
    error::{Error, Result},
    markdown::{table, thousands},
};

/// Returns the page.
#[must_use]
pub fn page(figures: &Figures) -> String {
    let parts = [
        head(figures),
        switch::section(&figures.switch),
        exits(figures),
        intel(figures),
        counted(figures),
        timed(figures),
        times(figures),
        memory(figures),
        kvm::section(&figures.kvm),
        previrtualization::section(&figures.previrtualization),
        checkpoint::section(&figures.checkpoint),
        migration::section(&figures.migration),
        guard::section(&figures.guard),
    ];
    parts.join("\n")
}

/// Checks the promises. The error lists those that are broken.
pub fn judge(promises: &[(bool, &'static str)]) -> Result<()> {
    let broken: Vec<&str> = promises.iter().filter(|(kept, _)| !kept).map(|(_, what)| *what).collect();
    if broken.is_empty() { Ok(()) } else { Err(Error::Unhealthy(broken.join("; "))) }
}

fn head(figures: &Figures) -> String {
    let machine = &figures.machine;
    format!(
        "# Benchmarks\n\n\
        `make bench` wrote this page; [benchmarks.json](benchmarks.json) has the same figures for tools. \
        They were\n\
        measured in the lab on {}: {}; Linux {}; Mercury {}.\n\n\
        An emulator on a shared host measures no useful microseconds. The figures are of three kinds:\n\n\
        - **instructions**, which the emulator counts on a machine with one CPU, the same in each run;\n\
        - **exits**, which the hypervisor counts;\n\
        - **ratios** of measurements side by side in one run.\n\n\
        No emulator shows TLBs, caches and the processor's own work. VMRUN, \
        an exit and a nested page walk count as\n\
        nothing here. Their costs await real hardware.\n",
        machine.emulator, machine.processor, machine.kernel, machine.version
    )
}

fn exits(figures: &Figures) -> String {
    let exits = &figures.exits_under_postgres;
    let reasons = exits.by_reason.iter().map(|(reason, count)| vec![reason.clone(), thousands(*count)]);
    format!(
        "## Exits at work\n\n\
        {} seconds of PostgreSQL (pgbench's TPC-B, four clients, {} transactions) while attached, on {}:\n\
        **{} exits a second**. The measurement itself causes {}: one hypercall on each CPU.\n\n{}",
        exits.seconds,
        thousands(exits.transactions),
        figures.machine.timed_on,
        exits.steady_exits_per_second,
        exits.of_the_question,
        table(&["reason", "exits"], &reasons.collect::<Vec<_>>())
    )
}

fn intel(figures: &Figures) -> String {
    let intel = &figures.intel;
    let exits = &intel.exits_under_postgres;
    let reasons = exits.by_reason.iter().map(|(reason, count)| vec![reason.clone(), thousands(*count)]);
    format!(
        "## Exits on Intel\n\n\
        A load that only computes causes **{} exits a second**. On VMX, unlike SVM, CPUID always exits. \
        A program\n\
        executes {:.0} of them before its `main`. {} seconds of PostgreSQL ({} transactions), on {}:\n\n{}",
        intel.compute_exits_per_second,
        intel.cpuid_exits_per_program,
        exits.seconds,
        thousands(exits.transactions),
        intel.machine,
        table(&["reason", "exits"], &reasons.collect::<Vec<_>>())
    )
}

fn counted(figures: &Figures) -> String {
    let paper = |compared: &Compared, of: &std::collections::BTreeMap<String, f64>| {
        of.get(&compared.name).map_or_else(String::new, |ratio| format!("{ratio:.2}"))
    };
    let row = |compared: &Compared| {
        let mut row = shared_columns(compared, |cost| thousands(cost.round() as u64));
        row.push(paper(compared, &figures.paper.native_mercury_over_native_linux));
        row.push(paper(compared, &figures.paper.attached_over_native_linux));
        row
    };
    let rows: Vec<Vec<String>> = figures.counted.iter().map(row).collect();
    let header = [
        "benchmark",
        "per",
        "native",
        "loaded",
        "attached",
        "after detach",
        "noise",
        "JCST 2012: M-N",
        "JCST 2012: M-V",
    ];
    format!(
        "## Operations and applications, in instructions\n\n\
        Measured on {}, with instructions counted and without randomized addresses. \
        \"native\" is the median cost\n\
        without Mercury, in instructions. The other columns are ratios to that cost.\n\n\
        Each round has four phases: without Mercury, loaded, attached, after detach. \
        Each phase is divided by the mean\n\
        of the two measurements without Mercury around it. The first of these comes before the driver was \
        ever loaded.\n\
        The others come after `mercury unload`, which frees everything and removes the module. \
        \"noise\" is the largest\n\
        difference between a measurement without Mercury and the two around it. \
        M-N and M-V are the Mercury of JCST\n\
        2012, table 1 (one processor), in native and in virtual mode, divided by native Linux.\n\n{}\n\
        The operations are those of `mercury bench os`: nine of lmbench's, which the papers' tables have, \
        and two\n\
        more. The protection fault includes its signal. dbench and a small build work in tmpfs. \
        iperf3 and ping use\n\
        the loopback. No disk and no network card is measured here.\n",
        figures.machine.counted_on,
        table(&header, &rows)
    )
}

fn shared_columns(compared: &Compared, cost: impl Fn(f64) -> String) -> Vec<String> {
    let mut row = vec![compared.name.clone(), compared.operation.to_owned(), cost(compared.never_loaded)];
    row.extend(
        [compared.loaded, compared.attached, compared.after_detach]
            .map(|ratio| format!("{:.3}", ratio.median)),
    );
    row.push(format!("±{:.3}", compared.noise));
    row
}

fn timed(figures: &Figures) -> String {
    if figures.timed.is_empty() {
        return String::new();
    }
    let row = |compared: &Compared| {
        let mut row = shared_columns(compared, |ns| format!("{:.1} µs", ns / 1e3));
        row.push(format!("{:.2} – {:.2}", compared.after_detach.low, compared.after_detach.high));
        row
    };
    let rows: Vec<Vec<String>> = figures.timed.iter().map(row).collect();
    let header =
        ["benchmark", "per", "native", "loaded", "attached", "after detach", "noise", "after detach, 95 %"];
    format!(
        "## The same in time, on two CPUs\n\n\
        Measured on {}, in the same rounds. This is the wall time of an emulator on a shared host, \
        so look at the\n\
        noise first. While attached the emulator walks nested page tables in software. \
        That costs time where a program\n\
        touches much memory. A processor walks them in hardware, at another cost.\n\n{}",
        figures.machine.timed_on,
        table(&header, &rows)
    )
}

fn times(figures: &Figures) -> String {
    let times = &figures.switch_times_us;
    let row = |name: &str, summary: &serde_json::Value, paper: f64| {
        let mut row = vec![name.to_owned()];
        row.extend(["min", "median", "p99", "max"].map(|key| summary[key].to_string()));
        row.push(paper.to_string());
        row
    };
    let rows = [
        row("attach", &times.attach, figures.paper.attach_us),
        row("detach", &times.detach, figures.paper.detach_us),
    ];
    format!(
        "## Switch times\n\n\
        {} switches of each CPU with interrupts off, in microseconds of the emulator. \
        An exit and back takes {} µs\n\
        there.\n\n{}",
        times.attach["count"],
        times.round_trip_median,
        table(&["switch", "min", "median", "p99", "max", "JCST 2012"], &rows)
    )
}

fn memory(figures: &Figures) -> String {
    let kib = |bytes: u64| format!("{} KiB", thousands(bytes / 1024));
    let row = |what: String, memory: &super::Memory| {
        vec![what, kib(memory.fixed_bytes), kib(memory.per_cpu_bytes), memory.possible_cpus.to_string()]
    };
    let mut rows: Vec<Vec<String>> = figures
        .switch
        .by_memory
        .iter()
        .map(|counts| row(format!("{} MiB", thousands(counts.memory_mib.into())), &counts.memory))
        .collect();
    rows.push(row(figures.machine.timed_on.clone(), &figures.memory));
    rows.push(vec!["at most".to_owned(), kib(4 << 20), kib(64 << 10), String::new()]);
    format!(
        "## Memory\n\n\
        Memory that the hypervisor holds after `mercury load`, attached or not.\n\n{}",
        table(&["machine", "fixed", "for each CPU", "CPUs"], &rows)
    )
}

/// Checks the promises of all figures.
///
/// # Errors
/// With the promises that are broken.
pub fn verdict(figures: &Figures) -> Result<()> {
    let memory = figures.switch.by_memory.iter().map(|counts| &counts.memory).chain([&figures.memory]);
    let small =
        memory.into_iter().all(|memory| memory.fixed_bytes <= 4 << 20 && memory.per_cpu_bytes <= 64 << 10);
    let mut checks = vec![
        (figures.steady_exits_per_second == 0.0, "there are exits at work".to_owned()),
        (small, "more memory is held than promised".to_owned()),
        (
            figures.intel.compute_exits_per_second == 0.0,
            "there are exits on Intel while it computes".to_owned(),
        ),
    ];
    checks.extend(figures.counted.iter().map(|compared| {
        let ratio = compared.after_detach.median;
        (compared.is_native_after_detach(), format!("{} after detach is {ratio:.4} of native", compared.name))
    }));
    let promises = switch::promises(&figures.switch).into_iter();
    let promises =
        promises.chain(checkpoint::promises(&figures.checkpoint)).chain(kvm::promises(&figures.kvm));
    let promises = promises.chain(migration::promises(&figures.migration));
    let promises = promises.chain(guard::promises(&figures.guard));
    checks.extend(promises.map(|(kept, what)| (kept, what.to_owned())));
    let broken = checks.into_iter().filter(|(kept, _)| !kept).map(|(_, what)| what);
    let broken: Vec<String> = broken.chain(previrtualization::broken(&figures.previrtualization)).collect();
    if broken.is_empty() { Ok(()) } else { Err(Error::Unhealthy(broken.join("; "))) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::{
        Description, JAILHOUSE, Memory, Paper, SwitchTimes, exits::Exits, intel::Intel, stats::Ratio,
    };
    use super::*;
    use serde_json::{Value, json};
    use std::collections::BTreeMap;

    fn figures(after_detach: f64) -> Figures {
        let memory = Memory { fixed_bytes: 448 << 10, per_cpu_bytes: 40 << 10, possible_cpus: 1 };
        let same = Ratio { median: 1.0, low: 0.999, high: 1.001 };
        let fork = Compared {
            name: "fork".into(),
            operation: "call",
            never_loaded: 304_812.5,
            loaded: same,
            attached: same,
            after_detach: Ratio { median: after_detach, low: after_detach, high: after_detach },
            noise: 0.001,
            unloaded_over_first: same,
        };
        let machine = Description {
            emulator: "QEMU emulator version 7.2".into(),
            processor: "AMD EPYC".into(),
            kernel: "6.1".into(),
            version: "0.1.0".into(),
            counted_on: "one CPU".into(),
            timed_on: "two CPUs".into(),
        };
        let times = json!({ "count": 400, "min": 19.5, "median": 21.7, "p99": 42.4, "max": 69.8 });
        Figures {
            attach_instructions: 517,
            detach_instructions: 219,
            exit_roundtrip_instructions: 88,
            steady_exits_per_second: 0.0,
            after_detach_over_never_loaded: BTreeMap::from([("fork".into(), after_detach)]),
            machine,
            switch: switch::kept_promises(),
            exits_under_postgres: Exits {
                seconds: 60,
                transactions: 1234,
                by_reason: BTreeMap::from([("hypercall".into(), 2)]),
                of_the_question: 2,
                steady_exits_per_second: 0.0,
            },
            memory,
            counted: vec![fork.clone()],
            timed: vec![fork],
            switch_times_us: SwitchTimes { attach: times.clone(), detach: times, round_trip_median: 6.5 },
            paper: Paper {
                attach_us: 220.0,
                detach_us: 60.0,
                attached_over_native_linux: BTreeMap::from([("fork".into(), 5.0)]),
                native_mercury_over_native_linux: BTreeMap::from([("fork".into(), 1.16)]),
            },
            peers: JAILHOUSE,
            intel: intel(),
            kvm: kvm::kept_promises(),
            previrtualization: previrtualization::tests::figures(),
            checkpoint: checkpoint::kept_promises(),
            migration: migration::tests::figures(),
            guard: guard::kept_promises(),
        }
    }

    fn intel() -> Intel {
        Intel {
            compute_exits_per_second: 0.0,
            cpuid_exits_per_program: 60.6,
            exits_under_postgres: Exits {
                seconds: 30,
                transactions: 321,
                by_reason: BTreeMap::from([("cpuid".into(), 123)]),
                of_the_question: 1,
                steady_exits_per_second: 4.1,
            },
            machine: "one CPU".into(),
        }
    }

    #[test]
    fn the_page_has_every_part() {
        let page = page(&figures(1.0));
        let squeezed = page.split_whitespace().collect::<Vec<_>>().join(" ");
        for part in [
            "| attach | 517 | 517 | 520 | 220 µs | 22,900,000 |",
            "**0 exits a second**",
            "| fork | call | 304,813 | 1.000 | 1.000 | 1.000 | ±0.001 | 1.16 | 5.00 |",
            "| fork | call | 304.8 µs | 1.000 | 1.000 | 1.000 | ±0.001 | 1.00 – 1.00 |",
            "| attach | 19.5 | 21.7 | 42.4 | 69.8 | 220 |",
            "| now | 1,000 | 2,754 | 1,754 | 1,001 |",
            "executes 61 of them",
            "| at most | 4,096 KiB | 64 KiB |",
            "| boot and power-off | 1,000 | 1,010 | 1.0100 | 1.0000 – 1.0200 | 0.0100 | 3 |",
            "| natively | 4.0 |",
        ] {
            assert!(squeezed.contains(part), "{part:?} is not in\n{page}");
        }
    }

    #[test]
    fn tools_find_what_they_need_at_the_top() {
        let json: Value = serde_json::to_value(figures(1.0)).unwrap();
        assert_eq!((&json["attach_instructions"], &json["detach_instructions"]), (&517.into(), &219.into()));
        assert_eq!(json["exit_roundtrip_instructions"], 88);
        assert_eq!(json["steady_exits_per_second"], 0.0);
        assert_eq!(json["after_detach_over_never_loaded"]["fork"], 1.0);
    }

    #[test]
    fn a_broken_promise_is_named() {
        assert!(verdict(&figures(1.0)).is_ok());
        assert!(verdict(&figures(1.004)).is_ok());
        let slower = verdict(&figures(1.02)).unwrap_err().to_string();
        assert!(slower.contains("fork after detach is 1.02"), "{slower}");
        let mut slow = figures(1.0);
        slow.intel.compute_exits_per_second = 0.5;
        assert!(verdict(&slow).unwrap_err().to_string().contains("exits on Intel"));
        let mut long = figures(1.0);
        long.switch.by_memory[0].attach_instructions = 601;
        assert!(verdict(&long).unwrap_err().to_string().contains("attach is longer"));
    }
}

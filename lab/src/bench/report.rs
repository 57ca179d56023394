//! docs/benchmarks.md, and whether the promises are kept.

use super::{Compared, Counts, Figures};
use crate::{
    error::{Error, Result},
    markdown::{table, thousands},
};

/// Upper bounds that the project promises.
const ATTACH_AT_MOST: u64 = 600;
const DETACH_AT_MOST: u64 = 300;
const ROUND_TRIP_AT_MOST: u64 = 150;

/// The page.
#[must_use]
pub fn page(figures: &Figures) -> String {
    let parts = [
        head(figures),
        switch(figures),
        exits(figures),
        counted(figures),
        timed(figures),
        times(figures),
        memory(figures),
    ];
    parts.join("\n")
}

fn head(figures: &Figures) -> String {
    let machine = &figures.machine;
    format!(
        "# Benchmarks\n\n\
        Written by `make bench`; [benchmarks.json](benchmarks.json) has the same for tools. Measured in the lab, on\n\
        {}: {}; Linux {}; Mercury {}.\n\n\
        An emulator on a shared host says nothing about microseconds. What is said here are **instructions**, counted by\n\
        the emulator on a machine with one CPU, the same in each run; **exits**, counted by the hypervisor; and **ratios**\n\
        of what was measured side by side in one run. What no emulator shows are TLBs, caches and the processor's own\n\
        work: VMRUN, an exit and a nested page walk count as nothing here. Those await real hardware.\n",
        machine.emulator, machine.processor, machine.kernel, machine.version
    )
}

fn switch(figures: &Figures) -> String {
    let row = |what: &str, of: fn(&Counts) -> u64, at_most: u64, paper: &str, peer: &str| {
        let mut row = vec![what.to_owned()];
        row.extend(figures.switch_by_memory.iter().map(|counts| thousands(of(counts))));
        row.extend([at_most.to_string(), paper.to_owned(), peer.to_owned()]);
        row
    };
    let enable = thousands(figures.peers.jailhouse_enable_instructions);
    let disable = thousands(figures.peers.jailhouse_disable_instructions);
    let rows = [
        row("attach", |counts| counts.attach_instructions, ATTACH_AT_MOST, "220 µs", &enable),
        row("detach", |counts| counts.detach_instructions, DETACH_AT_MOST, "60 µs", &disable),
        row("exit and back", |counts| counts.exit_roundtrip_instructions, ROUND_TRIP_AT_MOST, "", ""),
    ];
    let sizes: Vec<String> = figures
        .switch_by_memory
        .iter()
        .map(|counts| format!("{} MiB", thousands(counts.memory_mib.into())))
        .collect();
    let mut header = vec!["instructions"];
    header.extend(sizes.iter().map(String::as_str));
    header.extend(["at most", "the paper", "Jailhouse"]);
    format!(
        "## The switch\n\n\
        With interrupts off, on each CPU by itself. The paper switched all CPUs together; so does Jailhouse, the nearest\n\
        living peer, whose figures are instructions in the same emulator (4 CPUs). That no CPU waits for another is a test:\n\
        `lab/tests/kernel.rs` holds one with interrupts off while the others switch.\n\n{}",
        table(&header, &rows)
    )
}

fn exits(figures: &Figures) -> String {
    let exits = &figures.exits_under_postgres;
    let reasons = exits.by_reason.iter().map(|(reason, count)| vec![reason.clone(), thousands(*count)]);
    format!(
        "## Exits at work\n\n\
        {} seconds of PostgreSQL (pgbench's TPC-B, four clients, {} transactions) while attached, on {}:\n\
        **{} exits a second**. The question itself makes {}: one hypercall on each CPU.\n\n{}",
        exits.seconds,
        thousands(exits.transactions),
        figures.machine.timed_on,
        exits.steady_exits_per_second,
        exits.of_the_question,
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
        "paper: native",
        "paper: attached",
    ];
    format!(
        "## The paper's benchmarks, in instructions\n\n\
        {}, counting. \"native\" is the median of the costs without Mercury, in instructions; the others are ratios to it.\n\
        Each round is: without Mercury, loaded, attached, after detach; each is divided by the mean of the two\n\
        measurements without Mercury around it. The first of those comes before the driver was ever loaded, the others\n\
        after `mercury unload`, which frees everything and removes the module. \"noise\" is the largest difference that a\n\
        measurement without Mercury shows from the two around it. The paper's columns are its Mercury by native Linux, in\n\
        native and in attached mode, of its table 1.\n\n{}\n\
        dbench and the build work in tmpfs; iperf3 and ping go over the loopback. lmbench's part is `mercury bench os`;\n\
        protection-fault includes the signal.\n",
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
        {}, in the same rounds. The wall's time of an emulator that shares its host: look at the noise first. While\n\
        attached the emulator walks nested page tables in software, which costs where a program touches much memory; a\n\
        processor does that in hardware, and differently.\n\n{}",
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
        {} switches of each CPU, with interrupts off, in microseconds of the emulator, which is slower than any processor\n\
        of the paper's; an exit and back takes {} µs there.\n\n{}",
        times.attach["count"],
        times.round_trip_median,
        table(&["switch", "min", "median", "p99", "max", "the paper"], &rows)
    )
}

fn memory(figures: &Figures) -> String {
    let kib = |bytes: u64| format!("{} KiB", thousands(bytes / 1024));
    let row = |what: String, memory: &super::Memory| {
        vec![what, kib(memory.fixed_bytes), kib(memory.per_cpu_bytes), memory.possible_cpus.to_string()]
    };
    let mut rows: Vec<Vec<String>> = figures
        .switch_by_memory
        .iter()
        .map(|counts| row(format!("{} MiB", thousands(counts.memory_mib.into())), &counts.memory))
        .collect();
    rows.push(row(figures.machine.timed_on.clone(), &figures.memory));
    rows.push(vec!["at most".to_owned(), kib(4 << 20), kib(64 << 10), String::new()]);
    format!(
        "## Memory\n\n\
        What the pre-cached hypervisor holds, attached or not.\n\n{}",
        table(&["machine", "fixed", "for each CPU", "CPUs"], &rows)
    )
}

/// Whether the promises are kept.
///
/// # Errors
/// With those that are not.
pub fn verdict(figures: &Figures) -> Result<()> {
    let memory = figures.switch_by_memory.iter().map(|counts| &counts.memory).chain([&figures.memory]);
    let small =
        memory.into_iter().all(|memory| memory.fixed_bytes <= 4 << 20 && memory.per_cpu_bytes <= 64 << 10);
    let flat = figures.switch_by_memory.windows(2).all(|pair| {
        (pair[0].attach_instructions, pair[0].detach_instructions)
            == (pair[1].attach_instructions, pair[1].detach_instructions)
    });
    let mut checks = vec![
        (figures.attach_instructions <= ATTACH_AT_MOST, "attach is longer than promised".to_owned()),
        (figures.detach_instructions <= DETACH_AT_MOST, "detach is longer than promised".to_owned()),
        (
            figures.exit_roundtrip_instructions <= ROUND_TRIP_AT_MOST,
            "an exit is longer than promised".to_owned(),
        ),
        (flat, "the length of a switch depends on the size of memory".to_owned()),
        (figures.steady_exits_per_second == 0.0, "there are exits at work".to_owned()),
        (small, "more memory is held than promised".to_owned()),
    ];
    checks.extend(figures.counted.iter().map(|compared| {
        let ratio = compared.after_detach.median;
        (compared.is_native_after_detach(), format!("{} after detach is {ratio:.4} of native", compared.name))
    }));
    let broken: Vec<String> = checks.into_iter().filter(|(kept, _)| !kept).map(|(_, what)| what).collect();
    if broken.is_empty() { Ok(()) } else { Err(Error::Unhealthy(broken.join("; "))) }
}

//! The table at the end of the demonstration, and the verdict.

use comfy_table::Table;
use serde_json::Value;

use super::{
    Check, conclude,
    database::Measured,
    switch::{CYCLES, Seen},
    table, try_next,
};
use mercury_lab::{error::Result, spec::Vendor};

/// Prints all observations.
pub fn print(seen: &Seen) {
    println!("\n{}", seen.machine);
    println!("\nTime with interrupts off for one switch of one CPU, in the emulator's microseconds (a");
    println!("value in milliseconds shows that the host ran other work in between):\n");
    println!("{}", switches(&seen.switches));
    println!(
        "\nLongest pause that a spinning thread saw on its CPU, in milliseconds (the machine is under full \
         load;"
    );
    println!("\"asking\" is the same measurement while the modes are only read):\n");
    println!("{}", pauses(&seen.switches));
    println!(
        "\nPostgreSQL, pgbench's own mix, for some seconds each. The first row has cold caches, \
         so that later rows"
    );
    println!(
        "may be faster; on a shared host the ratios vary widely. In \"while switching\" no CPU has one mode \
         for long:\n"
    );
    println!("{}", database(seen));
    println!(
        "\nExits into the hypervisor by reason, all CPUs, since load. A row \"msr-…\" is the driver's own, \
         too: it reads"
    );
    println!("these registers when it checks a CPU that is attached:\n");
    println!("{}", exits(seen));
    println!("\n{} rounds of primes and hashes, every result right.", seen.compute_rounds);
    println!("Microseconds of an emulator on a shared machine say little: `make bench` counts instructions.");
}

/// Checks the observations. The error names what was lost, wrong or complained about.
///
/// # Errors
/// If a check fails.
pub fn verdict(seen: &Seen) -> Result<()> {
    let failed: u64 = [seen.never_loaded, seen.attached, seen.switching, seen.after_detach]
        .iter()
        .map(|measured| measured.failed)
        .sum();
    let cycles = seen.switches["cycles"].as_u64().unwrap_or(0);
    let native = cpus(&seen.status).iter().all(|cpu| cpu["mode"] == "native");
    let checks = [
        Check::new(failed == 0, format!("failed transactions: {failed}")),
        Check::new(seen.balances_agree, "no transaction lost: balances and history agree"),
        Check::new(cycles >= u64::from(CYCLES), format!("cycles of attach and detach on each CPU: {cycles}")),
        Check::new(
            seen.steady_exits == 0,
            format!("exits while attached, beside {}: {}", expected_exits(seen), seen.steady_exits),
        ),
        Check::new(native, "every CPU is native again"),
        Check::new(seen.complaint.is_none(), "the kernel has no complaint"),
    ];
    conclude(&checks, seen.complaint.as_deref())?;
    try_next(&[
        ("make shell", "a machine to play with: attach, snapshot, checkpoint and their undoing by hand"),
        ("make demo-checkpoint", "the whole machine into an image, power off, and brought back elsewhere"),
        ("make demo-move", "a running machine moves to another one and back, with its clients connected"),
        ("make bench", "what a switch costs, in instructions"),
    ]);
    Ok(())
}

/// Returns the exits that occur without a request.
fn expected_exits(seen: &Seen) -> &'static str {
    match seen.vendor {
        Vendor::Amd => "the driver's own",
        Vendor::Intel => "the driver's own and CPUID's",
    }
}

fn cpus(value: &Value) -> &[Value] {
    value["cpus"].as_array().map_or(&[], Vec::as_slice)
}

fn decimal(value: &Value) -> String {
    value.as_f64().map_or_else(|| "–".to_owned(), |number| format!("{number:.1}"))
}

fn switches(bench: &Value) -> Table {
    let mut table = table(&["", "CPU", "min", "median", "p99", "max", "the paper's"]);
    for what in ["attach", "detach"] {
        let paper = decimal(&bench["paper"][format!("{what}_us")]);
        for cpu in cpus(&bench[what]) {
            let mut row = vec![what.to_owned(), cpu["cpu"].to_string()];
            row.extend(["min", "median", "p99", "max"].map(|key| decimal(&cpu["us"][key])));
            row.push(paper.clone());
            table.add_row(row);
        }
    }
    table
}

fn pauses(bench: &Value) -> Table {
    let mut table = table(&["CPU", "asking", "switching"]);
    for cpu in bench["pauses"].as_array().map_or(&[][..], Vec::as_slice) {
        let milliseconds = |key: &str| cpu[key].as_f64().map_or(0.0, |us| us / 1000.0);
        let columns = ["asking_us", "switching_us"].map(|key| format!("{:.1}", milliseconds(key)));
        table.add_row([&[cpu["cpu"].to_string()], &columns[..]].concat());
    }
    table
}

fn database(seen: &Seen) -> Table {
    let mut table = table(&["", "transactions/s", "÷ never loaded", "done", "failed"]);
    let rows = [
        ("never loaded", seen.never_loaded),
        ("attached", seen.attached),
        ("while switching", seen.switching),
        ("after detach", seen.after_detach),
    ];
    for (name, measured) in rows {
        let Measured { per_second, done, failed } = measured;
        let ratio = per_second / seen.never_loaded.per_second;
        table.add_row([
            name.to_owned(),
            format!("{per_second:.1}"),
            format!("{ratio:.2}"),
            done.to_string(),
            failed.to_string(),
        ]);
    }
    table
}

fn exits(seen: &Seen) -> Table {
    let mut table = table(&["reason", "exits"]);
    let mut sums = std::collections::BTreeMap::new();
    for cpu in cpus(&seen.status) {
        for (reason, count) in cpu["exits"].as_object().into_iter().flatten() {
            *sums.entry(reason.clone()).or_insert(0) += count.as_u64().unwrap_or(0);
        }
    }
    for (reason, count) in sums {
        let note =
            if reason == "hypercall" { " (the driver's own; most are measured round trips)" } else { "" };
        table.add_row([format!("{reason}{note}"), count.to_string()]);
    }
    let steady = format!("while attached and left alone, beside {}", expected_exits(seen));
    table.add_row([steady, seen.steady_exits.to_string()]);
    table
}

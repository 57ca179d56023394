//! Predicted refusals of the operations on the whole machine, by the same checks as the commands
//! make.

use super::{
    Grade, Item, Section,
    machine::{Asked, Machine},
    verdict_of,
};
use mercury_abi::{code::Code, facts::CpuFacts};
use mercury_control::explain;
use mercury_preflight::{Vendor, vendor, vmx::can_roll_back};
use mercury_relocation::refusals::{Answer, Operation};

/// Makes a section for each operation.
#[must_use]
pub fn sections(machine: &Machine, can_attach: &'static str) -> Vec<Section> {
    let section = |operation: &'static str, needed: Option<Item>, own: Vec<Item>| {
        let mut items: Vec<_> = needed.into_iter().chain(kept(machine)).collect();
        items.extend(own);
        if machine.answers.is_none() {
            items.push(
                Item::new(
                    "this machine",
                    Grade::CannotTell,
                    "only root sees the open files of other users' processes",
                )
                .hint("run `sudo mercury doctor`"),
            );
        }
        Section { operation, possible: verdict_of(&items), items }
    };
    vec![
        section("checkpoint", attach(can_attach), checkpoint(machine)),
        section("snapshot", attach(can_attach), snapshot(machine)),
        section("migrate", monitor(machine).or_else(|| attach(can_attach)), migrate(machine)),
    ]
}

/// Makes the item for attach, which each operation needs first.
fn attach(can_attach: &str) -> Option<Item> {
    match can_attach {
        "yes" => None,
        "no" => {
            Some(Item::new("attach", Grade::Refused, "attach is refused, and this operation attaches first"))
        }
        _ => Some(Item::new("attach", Grade::CannotTell, "it is unknown if attach is refused")),
    }
}

/// Makes the item for the monitor of a guest that moves away, which does what the hypervisor does otherwise.
fn monitor(machine: &Machine) -> Option<Item> {
    let answers = machine.monitor.is_some_and(|monitor| monitor.answers_calls);
    answers.then(|| Item::new("monitor", Grade::Ok, "Mercury's monitor stands in for the hypervisor"))
}

/// Makes the item for a snapshot that is kept: each operation makes one, and there can be only one
/// at a time.
fn kept(machine: &Machine) -> Option<Item> {
    let Asked::Answered { snapshot: Some(code), .. } = &machine.asked else { return None };
    let entry = explain::entry(*code);
    let item = Item::new("kept snapshot", Grade::Refused, entry.meaning).hint(entry.remedy);
    Some(Item { code: Some(code.name()), ..item })
}

fn answers(machine: &Machine, operation: Operation) -> &[Answer] {
    let all = machine.answers.iter().flatten();
    let mut wanted = all.filter(|(asked, _)| *asked == operation);
    wanted.next().map(|(_, answers)| answers.as_slice()).unwrap_or_default()
}

fn items(machine: &Machine, operation: Operation) -> Vec<Item> {
    answers(machine, operation).iter().map(item).collect()
}

fn item(answer: &Answer) -> Item {
    match &answer.result {
        Ok(fine) => Item::new(answer.about, Grade::Ok, *fine),
        Err(error) => Item {
            hint: error.hint.clone(),
            code: error.code.map(Code::name),
            ..Item::new(answer.about, Grade::Refused, error.plain_message())
        },
    }
}

/// Makes the items of a checkpoint. Reasons that only --poweroff has are no refusal.
fn checkpoint(machine: &Machine) -> Vec<Item> {
    let mut found = items(machine, Operation::Checkpoint);
    let plain: Vec<_> = found.iter().map(|item| item.check).collect();
    let with_poweroff = items(machine, Operation::PowerOff).into_iter();
    for mut item in with_poweroff.filter(|item| !plain.contains(&item.check)) {
        if item.grade == Grade::Refused {
            item.grade = Grade::Warning;
            item.text = format!("with --poweroff it would be refused: {}", item.text);
        }
        found.push(item);
    }
    let outdated = machine.outdated.iter().map(|error| Item {
        hint: error.hint.clone(),
        code: error.code.map(Code::name),
        ..Item::new(
            "restore environment",
            Grade::Warning,
            format!("with --poweroff it would be refused: {}", error.plain_message()),
        )
    });
    found.extend(outdated);
    if machine.answers.is_some() && machine.local_disks {
        let text = "local disks go on changing after the instant";
        let hint = "an image can be restored only with the disks as they were at the instant: use \
            --poweroff or --hook";
        found.push(Item::new("local disks", Grade::Note, text).hint(hint));
    }
    found
}

fn snapshot(machine: &Machine) -> Vec<Item> {
    let mut found = items(machine, Operation::Snapshot);
    let lacks = |facts: &CpuFacts| vendor(facts) == Vendor::Intel && !can_roll_back(facts);
    if matches!(&machine.asked, Asked::Answered { facts, .. } if facts.iter().any(lacks)) {
        let entry = explain::entry(Code::RollbackUnsupported);
        let item = Item::new("processor", Grade::Refused, entry.meaning).hint(entry.remedy);
        found.push(Item { code: Some(Code::RollbackUnsupported.name()), ..item });
    }
    found
}

fn migrate(machine: &Machine) -> Vec<Item> {
    let mut found = items(machine, Operation::Migrate);
    let maker = match &machine.asked {
        Asked::Answered { facts, .. } => facts.first().map(vendor),
        Asked::Unavailable(_) => None,
    };
    if maker == Some(Vendor::Intel) {
        let text =
            "there is none on this processor: applications stand still for longer, in proportion to memory";
        found.push(Item {
            code: Some(Code::LogUnsupported.name()),
            ..Item::new("dirty log", Grade::Note, text)
        });
    }
    if machine.answers.is_some() {
        let text = "only the destination can tell if it accepts this machine: `mercury migrate HOST`";
        found.push(Item::new("other machine", Grade::Note, text));
    }
    found
}

//! Manual pages and shell completions, from the definition of the command line.

use crate::{args::Cli, help::manual};
use clap::{Arg, Command, CommandFactory};
use clap_complete::{Shell, generate_to};
use mercury_control::explain::{self, Entry};
use std::{
    fs::{self, OpenOptions},
    io::{self, Write},
    path::Path,
};

/// Writes a page for the command and one for each of its visible subcommands.
pub fn man(directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    let mut command = Cli::command();
    command.build();
    page(&command, directory, "mercury")
}

fn page(command: &Command, directory: &Path, name: &str) -> io::Result<()> {
    let file = format!("{}.{}", name.replace(' ', "-"), manual::SECTION);
    fs::write(directory.join(file), manual::render(command, name)?)?;
    let visible = |sub: &&Command| !sub.is_hide_set() && sub.get_name() != "help";
    command
        .get_subcommands()
        .filter(visible)
        .try_for_each(|sub| page(sub, directory, &format!("{name} {}", sub.get_name())))
}

/// Writes the completions of the common shells.
pub fn completions(directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        let mut command = Cli::command();
        command.build();
        let file = generate_to(shell, &mut offered(&command), "mercury", directory)?;
        if shell == Shell::Fish {
            OpenOptions::new().append(true).open(file)?.write_all(fish_codes().as_bytes())?;
        }
    }
    Ok(())
}

/// Formats the codes for `mercury explain`: clap_complete lets fish complete values of options, and
/// not of arguments.
fn fish_codes() -> String {
    let quoted = |text: &str| format!("'{}'", text.replace('\\', r"\\").replace('\'', r"\'"));
    let line = |entry: &Entry| {
        let [code, meaning] = [entry.code.name(), entry.meaning].map(quoted);
        format!(
            "complete -c mercury -n \"__fish_mercury_using_subcommand explain\" -f -a {code} -d {meaning}\n"
        )
    };
    explain::TABLE.iter().map(line).collect()
}

/// Returns the command without hidden parts, which the shells would offer otherwise: its
/// subcommands and options, as far as completions show them.
fn offered(command: &Command) -> Command {
    let about = command.get_about().cloned().unwrap_or_default();
    let visible = command.get_subcommands().filter(|sub| !sub.is_hide_set() && sub.get_name() != "help");
    let built_in = |arg: &&Arg| matches!(arg.get_id().as_str(), "help" | "version");
    let arguments = command.get_arguments().filter(|arg| !arg.is_hide_set() && !built_in(arg));
    Command::new(command.get_name().to_owned())
        .about(about)
        .disable_version_flag(command.get_version().is_none())
        .version(command.get_version().unwrap_or_default().to_owned())
        .args(arguments.map(shown))
        .subcommands(visible.map(offered))
}

/// Returns an option or argument by itself: completions do not know which ones go together.
fn shown(arg: &Arg) -> Arg {
    let mut shown = Arg::new(arg.get_id().clone())
        .action(arg.get_action().clone())
        .value_parser(arg.get_value_parser().clone())
        .value_hint(arg.get_value_hint());
    shown = arg.get_long().into_iter().fold(shown, |shown, long| shown.long(long.to_owned()));
    shown = arg.get_short().into_iter().fold(shown, Arg::short);
    shown = arg.get_help().into_iter().fold(shown, |shown, help| shown.help(help.clone()));
    shown = arg.get_num_args().into_iter().fold(shown, Arg::num_args);
    shown = arg.get_index().into_iter().fold(shown, Arg::index);
    match arg.get_value_names() {
        Some(names) if arg.get_action().takes_values() => shown.value_names(names.to_vec()),
        _ => shown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn pages_for_all_commands() {
        let directory = tempfile::tempdir().expect("temporary directory");
        man(directory.path()).expect("pages");
        for name in ["mercury", "mercury-attach", "mercury-doctor", "mercury-bench-switch"] {
            let text = fs::read_to_string(directory.path().join(format!("{name}.8"))).expect(name);
            assert!(text.contains("not possible on this machine"), "{name}");
        }
        for page in fs::read_dir(directory.path()).expect("pages") {
            let page = page.expect("a page").path();
            let text = fs::read_to_string(&page).expect("text");
            for section in ["SYNOPSIS", "EXIT STATUS", "ENVIRONMENT", "EXAMPLES", "SEE ALSO"] {
                let heading = if section.contains(' ') { format!("{section:?}") } else { section.to_owned() };
                assert!(
                    text.contains(&format!(".SH {heading}\n")),
                    "{section} in {}: {text}",
                    page.display()
                );
            }
            let has_files = !page.to_string_lossy().contains("hosted");
            assert_eq!(text.contains(".SH FILES\n"), has_files, "{}", page.display());
        }
        let text = fs::read_to_string(directory.path().join("mercury-migrate.8")).expect("a page");
        assert!(text.contains("MERCURY_KEY") && !text.contains("pause"), "{text}");
        assert!(!directory.path().join("mercury-fault.8").exists());
    }

    #[test]
    fn completions_for_three_shells() {
        let directory = tempfile::tempdir().expect("temporary directory");
        completions(directory.path()).expect("completions");
        assert_eq!(fs::read_dir(directory.path()).expect("directory").count(), 3);
    }

    #[test]
    fn bash_completes_the_codes_of_explain() {
        let directory = tempfile::tempdir().expect("temporary directory");
        completions(directory.path()).expect("completions");
        let script = format!(
            ". {}/mercury.bash; COMP_WORDS=(mercury explain svm-) COMP_CWORD=2 COMP_LINE='mercury explain svm-'; \
             _mercury mercury svm- explain; printf '%s\\n' \"${{COMPREPLY[@]}}\"",
            directory.path().display()
        );
        let output = std::process::Command::new("bash").args(["-c", &script]).output().expect("bash");
        let offered = String::from_utf8(output.stdout).expect("text");
        let offered: BTreeSet<&str> = offered.lines().collect();
        let wanted = mercury_abi::code::Code::ALL.iter().map(|code| code.name());
        assert_eq!(offered, wanted.filter(|name| name.starts_with("svm-")).collect());
        for name in ["_mercury", "mercury.fish"] {
            let text = fs::read_to_string(directory.path().join(name)).expect(name);
            assert!(text.contains("svm-disabled"), "{name}");
        }
    }

    /// Collects the names of all hidden parts, at any depth, or of all others.
    fn names(command: &Command, hidden: bool, into: &mut BTreeSet<String>) {
        let options = command.get_arguments().filter(|arg| arg.is_hide_set() == hidden);
        into.extend(options.filter_map(|arg| Some(format!("--{}", arg.get_long()?))));
        for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
            names(sub, hidden, into);
        }
    }

    #[test]
    fn completions_offer_what_is_shown_and_nothing_that_is_hidden() {
        let directory = tempfile::tempdir().expect("temporary directory");
        completions(directory.path()).expect("completions");
        let bash = fs::read_to_string(directory.path().join("mercury.bash")).expect("a file");
        let words: BTreeSet<&str> = bash.split([' ', '"', '\n', ')', '(']).collect();
        let [mut hidden, mut shown] = [BTreeSet::new(), BTreeSet::new()];
        names(&Cli::command(), true, &mut hidden);
        names(&Cli::command(), false, &mut shown);
        assert!(hidden.len() > 5 && shown.len() > 50);
        assert!(shown.iter().all(|name| words.contains(name.as_str())), "{shown:?}");
        for name in hidden.difference(&shown) {
            assert!(!words.contains(name.as_str()), "{name}");
        }
        for subcommand in Cli::command().get_subcommands() {
            let is_offered = words.contains(format!("mercury,{}", subcommand.get_name()).as_str());
            assert_eq!(is_offered, !subcommand.is_hide_set(), "{}", subcommand.get_name());
        }
    }
}

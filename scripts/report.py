from rl.commands.report import main

raise SystemExit(main())

from rl.tools.commands.report import main

raise SystemExit(main())

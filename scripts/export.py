from rl.tools.commands.export import main

raise SystemExit(main())
